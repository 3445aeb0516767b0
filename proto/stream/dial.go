package stream

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

const (
	// DefaultDialTimeout bounds Dial from the first packet to the 101.
	DefaultDialTimeout = 15 * time.Second

	maxHead       = 32 << 10 // bytes of a response head
	maxErrorBody  = 4 << 10  // bytes of a refusal's text that are kept
	maxInterim    = 8        // 1xx answers before the one that counts
	bodyReadLimit = 2 * time.Second
)

var (
	errHeadTooLong = fmt.Errorf("stream: response head longer than %d bytes", maxHead)

	// ErrNotCarrel says that something answered the upgrade that is no Carrel
	// gateway, often a proxy on the way that does not pass Upgrade on.
	ErrNotCarrel = errors.New("stream: the answer is not from a Carrel gateway")
)

// StatusError is an answer other than 101 to an upgrade.
type StatusError struct {
	Code   int    // HTTP status
	Body   string // the answer's text, cut at 4 KiB
	Header http.Header
}

func (e *StatusError) Error() string {
	text := strings.TrimSpace(e.Body)
	if text == "" {
		text = http.StatusText(e.Code)
	}
	return fmt.Sprintf("gateway answered %d: %s", e.Code, text)
}

// ProxyError is a failure to get through an HTTP proxy; it names the proxy.
type ProxyError struct {
	Proxy string // host:port
	Err   error
}

func (e *ProxyError) Error() string { return fmt.Sprintf("proxy %s: %v", e.Proxy, e.Err) }

// Unwrap returns the cause.
func (e *ProxyError) Unwrap() error { return e.Err }

// DialFunc opens a connection as net.Dialer.DialContext does.
type DialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// Options say where and how Dial opens a stream.
type Options struct {
	URL    string      // http or https, with the path of the endpoint
	Header http.Header // sent with the request: authorisation and the like
	TLS    *tls.Config // for https; nil trusts the system's roots

	// Proxy chooses a proxy as http.Transport.Proxy does; nil means
	// http.ProxyFromEnvironment. The stream passes it by CONNECT, whatever
	// the scheme of URL. Proxies of scheme http and https are known.
	Proxy func(*http.Request) (*url.URL, error)

	DialContext DialFunc      // nil: a net.Dialer
	Timeout     time.Duration // of the whole of Dial; 0: DefaultDialTimeout
	DeadPeer    time.Duration // see SetDeadPeer; 0: DefaultDeadPeer
}

// Dial opens a stream with `Upgrade: carrel`. Where there is no TLS the result
// is the dialled connection itself (a *net.TCPConn, unless DialContext gives
// something else), else a *tls.Conn; in both cases no byte behind the answer's
// head has been read. The header is that head's. An answer other than 101 is a
// *StatusError, a failure on the way through a proxy a *ProxyError.
func Dial(ctx context.Context, o Options) (net.Conn, http.Header, error) {
	u, err := url.Parse(o.URL)
	if err != nil {
		return nil, nil, fmt.Errorf("stream address: %w", err)
	}
	if (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "" {
		return nil, nil, fmt.Errorf("stream address %q: need http://HOST or https://HOST", o.URL)
	}
	o = o.withDefaults()
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout,
		fmt.Errorf("no answer from %s within %v: %w", u.Host, o.Timeout, context.DeadlineExceeded))
	defer cancel()

	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
	if err != nil {
		return nil, nil, fmt.Errorf("stream request: %w", err)
	}
	for k, v := range o.Header {
		req.Header[k] = v
	}
	conn, err := o.connect(ctx, req)
	if err != nil {
		return nil, nil, whyNot(ctx, err)
	}
	header, err := o.upgrade(ctx, conn, req)
	if err != nil {
		_ = conn.Close()
		return nil, nil, whyNot(ctx, err)
	}
	return conn, header, nil
}

func (o Options) withDefaults() Options {
	if o.Timeout <= 0 {
		o.Timeout = DefaultDialTimeout
	}
	if o.DialContext == nil {
		o.DialContext = (&net.Dialer{}).DialContext
	}
	if o.Proxy == nil {
		o.Proxy = http.ProxyFromEnvironment
	}
	return o
}

// whyNot puts the cause of an ended context in place of the i/o error that
// follows from it, but keeps the name of a proxy.
func whyNot(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	cause := context.Cause(ctx)
	var p *ProxyError
	if errors.As(err, &p) {
		return &ProxyError{Proxy: p.Proxy, Err: cause}
	}
	return cause
}

// connect returns a connection to the gateway, through a proxy where one is
// set and with TLS where the address asks for it.
func (o Options) connect(ctx context.Context, req *http.Request) (net.Conn, error) {
	proxy, err := o.Proxy(req)
	if err != nil {
		return nil, fmt.Errorf("proxy settings: %w", err)
	}
	target := hostPort(req.URL)
	var conn net.Conn
	if proxy == nil {
		conn, err = o.DialContext(ctx, "tcp", target)
	} else {
		conn, err = o.throughProxy(ctx, proxy, target)
	}
	if err != nil {
		return nil, err
	}
	if err := SetDeadPeer(conn, o.DeadPeer); err != nil {
		_ = conn.Close()
		return nil, err
	}
	if req.URL.Scheme != "https" {
		return conn, nil
	}
	return startTLS(ctx, conn, o.TLS, req.URL.Hostname())
}

func startTLS(ctx context.Context, conn net.Conn, base *tls.Config, host string) (net.Conn, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if base != nil {
		cfg = base.Clone()
	}
	if cfg.ServerName == "" {
		cfg.ServerName = host
	}
	cfg.NextProtos = []string{"http/1.1"} // only HTTP/1.1 can be upgraded
	c := tls.Client(conn, cfg)
	if err := c.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("TLS with %s: %w", host, err)
	}
	return c, nil
}

// upgrade sends the request and reads the answer's head, and the body of a
// refusal. conn has no deadline afterwards.
func (o Options) upgrade(ctx context.Context, conn net.Conn, req *http.Request) (http.Header, error) {
	release := interruptible(ctx, conn)
	defer func() { _ = release() }() // where it was not called below, another error is reported
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", Protocol)
	if err := req.Write(conn); err != nil {
		return nil, fmt.Errorf("send upgrade: %w", err)
	}
	head, err := finalHead(conn)
	if err != nil {
		return nil, fmt.Errorf("read answer to upgrade: %w", err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(head)), req)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotCarrel, err)
	}
	defer func() { _ = resp.Body.Close() }() // of the head alone: nothing of conn is in it
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return nil, refusal(conn, head, req)
	}
	if !strings.EqualFold(resp.Header.Get("Upgrade"), Protocol) {
		return nil, fmt.Errorf("%w: upgraded to %q", ErrNotCarrel, resp.Header.Get("Upgrade"))
	}
	if err := release(); err != nil {
		return nil, err
	}
	return resp.Header, nil
}

// interruptible makes the end of ctx end what conn is doing. The function that
// it returns stops that and clears the deadline; it fails where ctx was faster.
func interruptible(ctx context.Context, conn net.Conn) func() error {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	done := false
	return func() error {
		if done {
			return nil
		}
		done = true
		if !stop() {
			return context.Cause(ctx)
		}
		return conn.SetDeadline(time.Time{})
	}
}

// finalHead reads heads until one that is not an interim answer (100, 103).
func finalHead(r io.Reader) ([]byte, error) {
	for range maxInterim {
		head, err := readHead(r, maxHead)
		if err != nil {
			return nil, err
		}
		_, status, _ := strings.Cut(string(head[:min(len(head), 16)]), " ")
		if !strings.HasPrefix(status, "1") || strings.HasPrefix(status, "101") {
			return head, nil
		}
	}
	return nil, fmt.Errorf("%w: more than %d interim answers", ErrNotCarrel, maxInterim)
}

// refusal reads the text behind a head that is not 101.
func refusal(conn net.Conn, head []byte, req *http.Request) error {
	_ = conn.SetReadDeadline(time.Now().Add(bodyReadLimit))
	r := bufio.NewReader(io.MultiReader(bytes.NewReader(head), conn))
	resp, err := http.ReadResponse(r, req)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotCarrel, err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody)) // what came is what is shown
	return &StatusError{Code: resp.StatusCode, Body: string(body), Header: resp.Header}
}

func hostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = "80"
		if u.Scheme == "https" {
			port = "443"
		}
	}
	return net.JoinHostPort(u.Hostname(), port)
}
