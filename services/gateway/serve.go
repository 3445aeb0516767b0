package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/config"
	"github.com/carrel-dev/carrel/services/fleet"
)

// Limits of the public port (threat T-35). Go's defaults for headers (1 MiB) are more than any client of ours sends.
const (
	readHeaderTimeout    = 5 * time.Second
	idleTimeout          = 5 * time.Minute
	maxHeaderBytes       = 64 << 10
	maxConcurrentStreams = 250 // per HTTP/2 connection, Go's own default written down
	maxMessageBytes      = 1 << 20
)

// newServer returns the server of the public port: HTTP/1.1 and HTTP/2, in the clear only where the settings allow that.
func newServer(cfg *config.Config, handler http.Handler, log *slog.Logger) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	if cfg.PlainHTTP() {
		protocols.SetUnencryptedHTTP2(true)
	} else {
		protocols.SetHTTP2(true)
	}
	return &http.Server{
		Handler: handler, Protocols: protocols, ReadHeaderTimeout: readHeaderTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxConcurrentStreams,
			SendPingTimeout:      cfg.LinkPing,
			PingTimeout:          cfg.LinkPingTimeout,
			WriteByteTimeout:     cfg.StreamWriteTimeout,
		},
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug), // failed handshakes of scanners, mostly
	}
}

// listen binds the public port and wraps it in TLS where the settings ask for that. A busy port is an error that says what to do.
func listen(ctx context.Context, cfg *config.Config, ca *auth.TLSCA, now time.Time) (net.Listener, error) {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return nil, fleet.Wrap(err, fleet.KindUnavailable, "cannot listen on %s; end the program that holds it, or choose another address with --listen", cfg.Listen)
	}
	if cfg.PlainHTTP() {
		return ln, nil
	}
	cert, err := certificate(cfg, ca, now)
	if err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	return tls.NewListener(ln, &tls.Config{
		Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"},
	}), nil
}

func certificate(cfg *config.Config, ca *auth.TLSCA, now time.Time) (tls.Certificate, error) {
	if cfg.TLSCertFile != "" {
		cert, err := tls.LoadX509KeyPair(cfg.TLSCertFile, cfg.TLSKeyFile)
		if err != nil {
			return cert, fleet.Wrap(err, fleet.KindInvalid, "cannot use tls.cert_file %s with tls.key_file %s", cfg.TLSCertFile, cfg.TLSKeyFile)
		}
		return cert, nil
	}
	return ca.ServerCertificate(serverNames(cfg), now)
}

// serverNames returns all names and addresses under which clients may reach this machine.
func serverNames(cfg *config.Config) []string {
	names := append([]string{"localhost", "127.0.0.1", "::1"}, cfg.TLSNames...)
	if host, err := os.Hostname(); err == nil {
		names = append(names, host)
	}
	if host, _, err := net.SplitHostPort(cfg.Listen); err == nil && host != "" {
		names = append(names, host)
	}
	if host := hostOf(cfg.PublicURL); host != "" {
		names = append(names, host)
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return names
	}
	for _, a := range addrs {
		if ipnet, ok := a.(*net.IPNet); ok {
			names = append(names, ipnet.IP.String())
		}
	}
	return names
}

// serveMetrics runs the Prometheus listener until ctx ends; none when the setting is empty.
func serveMetrics(ctx context.Context, address string, handler http.Handler) error {
	if address == "" {
		<-ctx.Done()
		return nil
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return fleet.Wrap(err, fleet.KindUnavailable, "cannot listen on metrics_listen %s", address)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", handler)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: readHeaderTimeout}
	done := make(chan error, 1)
	go func() { done <- server.Serve(ln) }()
	select {
	case err := <-done:
		return fmt.Errorf("metrics listener: %w", err)
	case <-ctx.Done():
		err := server.Close()
		if end := <-done; !errors.Is(end, http.ErrServerClosed) {
			err = errors.Join(err, end)
		}
		return err
	}
}
