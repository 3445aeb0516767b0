package stream

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
)

// throughProxy returns a connection to target that the proxy passes on
// (CONNECT, RFC 9110 section 9.3.6).
func (o Options) throughProxy(ctx context.Context, proxy *url.URL, target string) (net.Conn, error) {
	name := hostPort(proxy)
	if proxy.Scheme != "http" && proxy.Scheme != "https" {
		return nil, &ProxyError{name, fmt.Errorf("scheme %q is not supported; use an http or https proxy", proxy.Scheme)}
	}
	conn, err := o.DialContext(ctx, "tcp", name)
	if err != nil {
		return nil, &ProxyError{name, err}
	}
	if proxy.Scheme == "https" {
		if conn, err = startTLS(ctx, conn, proxyTLS(o.TLS), proxy.Hostname()); err != nil {
			return nil, &ProxyError{name, err}
		}
	}
	if err := connectThrough(ctx, conn, proxy, target); err != nil {
		_ = conn.Close()
		return nil, &ProxyError{name, err}
	}
	return conn, nil
}

// proxyTLS keeps the roots of the gateway's configuration and nothing that is
// meant for the gateway alone.
func proxyTLS(base *tls.Config) *tls.Config {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if base != nil {
		cfg.RootCAs = base.RootCAs
	}
	return cfg
}

func connectThrough(ctx context.Context, conn net.Conn, proxy *url.URL, target string) error {
	release := interruptible(ctx, conn)
	var b strings.Builder
	fmt.Fprintf(&b, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n", target, target)
	if u := proxy.User; u != nil {
		password, _ := u.Password()
		auth := base64.StdEncoding.EncodeToString([]byte(u.Username() + ":" + password))
		fmt.Fprintf(&b, "Proxy-Authorization: Basic %s\r\n", auth)
	}
	b.WriteString("\r\n")
	if _, err := conn.Write([]byte(b.String())); err != nil {
		return fmt.Errorf("send CONNECT: %w", err)
	}
	head, err := finalHead(conn)
	if err != nil {
		return fmt.Errorf("read answer to CONNECT: %w", err)
	}
	req := &http.Request{Method: http.MethodConnect}
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(head)), req)
	if err != nil {
		return fmt.Errorf("answer to CONNECT: %w", err)
	}
	defer func() { _ = resp.Body.Close() }() // of the head alone: nothing of conn is in it
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("refused CONNECT %s: %s", target, resp.Status)
	}
	return release()
}
