package stream

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/proto/stream/streamtest"
)

const greeting = "SSH-2.0-carrel\r\n"

// greeter accepts streams and sends the greeting right behind the 101.
func greeter(tb testing.TB) http.Handler {
	var open sync.WaitGroup
	tb.Cleanup(open.Wait)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Path", r.URL.Path)
		conn, err := Accept(w, r)
		if err != nil {
			return
		}
		open.Go(func() {
			defer conn.Close()
			_, _ = io.WriteString(conn, greeting)
			_, _ = io.Copy(conn, conn)
		})
	})
}

func serve(tb testing.TB, h http.Handler) *httptest.Server {
	s := httptest.NewServer(h)
	tb.Cleanup(s.Close)
	return s
}

func serveTLS(tb testing.TB, h http.Handler) (*httptest.Server, *tls.Config) {
	server, client := streamtest.TLS(tb)
	s := httptest.NewUnstartedServer(h)
	s.TLS = server
	s.EnableHTTP2 = true
	s.StartTLS()
	tb.Cleanup(s.Close)
	return s, client
}

func noProxy(*http.Request) (*url.URL, error) { return nil, nil }

func checkGreeting(t *testing.T, conn net.Conn) {
	t.Helper()
	defer conn.Close()
	got := make([]byte, len(greeting))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != greeting {
		t.Fatalf("%q, %v", got, err)
	}
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, got[:1]); err != nil || got[0] != 'x' {
		t.Fatalf("%q, %v", got[:1], err)
	}
}

func TestDialGivesTheRawConnectionAndEveryByteBehindTheHead(t *testing.T) {
	s := serve(t, greeter(t))
	conn, header, err := Dial(t.Context(), Options{URL: s.URL + "/carrel/stream", Proxy: noProxy})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := conn.(*net.TCPConn); !ok {
		t.Errorf("a %T cannot be spliced", conn)
	}
	if header.Get("X-Path") != "/carrel/stream" {
		t.Errorf("header %v", header)
	}
	checkGreeting(t, conn)
}

func TestDialOverTLSOffersOnlyHTTP1(t *testing.T) {
	s, client := serveTLS(t, greeter(t))
	conn, _, err := Dial(t.Context(), Options{URL: s.URL, TLS: client, Proxy: noProxy})
	if err != nil {
		t.Fatal(err)
	}
	if v := conn.(*tls.Conn).ConnectionState().Version; v != tls.VersionTLS13 {
		t.Errorf("TLS %x", v)
	}
	checkGreeting(t, conn)
	if _, _, err := Dial(t.Context(), Options{URL: s.URL, Proxy: noProxy}); err == nil {
		t.Error("a certificate that nobody signed was taken")
	}
}

func TestDialReportsARefusalWithItsText(t *testing.T) {
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "newer session"+strings.Repeat(".", 1<<20), http.StatusConflict)
	}))
	_, _, err := Dial(t.Context(), Options{URL: s.URL, Proxy: noProxy})
	var se *StatusError
	if !errors.As(err, &se) || se.Code != 409 || !strings.HasPrefix(se.Body, "newer session") || len(se.Body) > maxErrorBody {
		t.Fatalf("%.100v", err)
	}
}

func TestDialRefusesOddAnswers(t *testing.T) {
	for name, answer := range map[string]string{
		"not HTTP":         "SSH-2.0-OpenSSH_9.2\r\n\r\n",
		"other protocol":   "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
		"endless head":     "HTTP/1.1 101 x\r\nA: " + strings.Repeat("a", 64<<10),
		"endless interims": strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 99),
		"cut":              "HTTP/1.1 101 Switching",
	} {
		t.Run(name, func(t *testing.T) {
			l := rawServer(t, func(c net.Conn) {
				if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
					_, _ = io.WriteString(c, answer)
				}
			})
			if _, _, err := Dial(t.Context(), Options{URL: "http://" + l, Proxy: noProxy}); err == nil {
				t.Fatal("taken")
			}
		})
	}
}

func TestDialSkipsInterimAnswers(t *testing.T) {
	l := rawServer(t, func(c net.Conn) {
		if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 101 Switching Protocols\r\nUpgrade: carrel\r\n\r\n"+greeting)
	})
	conn, _, err := Dial(t.Context(), Options{URL: "http://" + l, Proxy: noProxy})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := io.ReadAll(conn); string(got) != greeting {
		t.Fatalf("%q %v", got, err)
	}
}

func TestDialGivesUpASilentServer(t *testing.T) {
	l := rawServer(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	_, _, err := Dial(t.Context(), Options{URL: "http://" + l, Proxy: noProxy, Timeout: 50 * time.Millisecond})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), l) {
		t.Errorf("err %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, _, err := Dial(ctx, Options{URL: "http://" + l, Proxy: noProxy}); !errors.Is(err, context.Canceled) {
		t.Errorf("err %v", err)
	}
}

func TestDialRefusesBadAddresses(t *testing.T) {
	for _, u := range []string{"", "ftp://x", "http://", "gw:8080", "http://[::1"} {
		if _, _, err := Dial(t.Context(), Options{URL: u}); err == nil {
			t.Errorf("%q was taken", u)
		}
	}
}

func TestDialPassesAProxy(t *testing.T) {
	plain := serve(t, greeter(t))
	secure, client := serveTLS(t, greeter(t))
	for _, target := range []string{plain.URL, secure.URL} {
		p := newConnectProxy(t, "")
		conn, _, err := Dial(t.Context(), Options{URL: target, TLS: client, Proxy: http.ProxyURL(p.url("ann:pw"))})
		if err != nil {
			t.Fatal(err)
		}
		checkGreeting(t, conn)
		if p.passed.Load() != 1 {
			t.Errorf("%s did not go through the proxy", target)
		}
	}
}

func TestDialNamesAProxyThatRefusesOrIsSilent(t *testing.T) {
	p := newConnectProxy(t, "")
	silent := rawServer(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	for proxy, text := range map[string]string{
		p.url("ann:wrong").String(): "407",
		"http://" + silent:          "no answer",
		"socks5://" + silent:        "not supported",
		"http://127.0.0.1:1":        "refused",
	} {
		u, _ := url.Parse(proxy)
		_, _, err := Dial(t.Context(), Options{URL: "http://gw.test", Proxy: http.ProxyURL(u), Timeout: 200 * time.Millisecond})
		var pe *ProxyError
		if !errors.As(err, &pe) || pe.Proxy != u.Host || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", proxy, err)
		}
	}
}

// SSH-20 and its kin: the stream obeys the proxy variables as the API does.
// They are read once per process, so each case is a process of its own.
func TestDialObeysTheProxyEnvironment(t *testing.T) {
	if target := os.Getenv("STREAM_TEST_TARGET"); target != "" {
		conn, _, err := Dial(t.Context(), Options{URL: target})
		if err == nil {
			conn.Close()
		}
		fmt.Printf("dial: %v\n", err)
		return
	}
	s := serve(t, greeter(t))
	p := newConnectProxy(t, s.Listener.Addr().String())
	for name, c := range map[string]struct {
		env    string
		passed int64
	}{
		"HTTP_PROXY": {"HTTP_PROXY=" + p.url("ann:pw").String(), 1},
		"http_proxy": {"http_proxy=" + p.url("ann:pw").String(), 1},
		"NO_PROXY":   {"NO_PROXY=.test", 0},
	} {
		before := p.passed.Load()
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDialObeysTheProxyEnvironment$", "-test.v")
		cmd.Env = append([]string{"STREAM_TEST_TARGET=http://gw.test:80"}, c.env)
		if name == "NO_PROXY" {
			cmd.Env = append(cmd.Env, "HTTP_PROXY="+p.url("ann:pw").String())
		}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		ok := strings.Contains(string(out), "dial: <nil>")
		if got := p.passed.Load() - before; got != c.passed || ok != (c.passed == 1) {
			t.Errorf("%s: %d through the proxy: %s", name, got, out)
		}
	}
}

func TestAcceptRefusesWhatIsNoStream(t *testing.T) {
	s, client := serveTLS(t, greeter(t))
	h2 := &http.Client{Transport: &http.Transport{TLSClientConfig: client, ForceAttemptHTTP2: true}}
	defer h2.CloseIdleConnections()
	if resp := get(t, h2, s.URL); resp.StatusCode != 505 || resp.ProtoMajor != 2 {
		t.Errorf("HTTP/2: %s %s", resp.Proto, resp.Status)
	}
	plain := serve(t, greeter(t))
	h1 := &http.Client{Transport: &http.Transport{}}
	defer h1.CloseIdleConnections()
	if resp := get(t, h1, plain.URL); resp.StatusCode != 426 || resp.Header.Get("Upgrade") != Protocol {
		t.Errorf("no upgrade: %s", resp.Status)
	}
}

func get(t *testing.T, c *http.Client, u string) *http.Response {
	t.Helper()
	resp, err := c.Get(u)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp
}

func TestAcceptKeepsWhatTheClientSentTooEarly(t *testing.T) {
	s := serve(t, greeter(t))
	conn, err := net.Dial("tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: Carrel\r\n\r\nearly")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := readHead(conn, maxHead); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(greeting)+5)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != greeting+"early" {
		t.Fatalf("%q %v", got, err)
	}
}

// rawServer runs f for each connection and returns its address.
func rawServer(tb testing.TB, f func(net.Conn)) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	var open sync.WaitGroup
	open.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			open.Go(func() { defer c.Close(); f(c) })
		}
	})
	tb.Cleanup(func() { l.Close(); open.Wait() })
	return l.Addr().String()
}

// connectProxy is an HTTP proxy that knows CONNECT and asks for ann:pw.
type connectProxy struct {
	addr    string
	rewrite string // goes there whatever was asked for
	passed  atomic.Int64
}

func newConnectProxy(tb testing.TB, rewrite string) *connectProxy {
	p := &connectProxy{rewrite: rewrite}
	p.addr = rawServer(tb, p.handle)
	return p
}

func (p *connectProxy) url(user string) *url.URL {
	u, _ := url.Parse("http://" + user + "@" + p.addr)
	return u
}

func (p *connectProxy) handle(c net.Conn) {
	req, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil {
		return
	}
	want := "Basic " + base64.StdEncoding.EncodeToString([]byte("ann:pw"))
	if req.Method != http.MethodConnect || req.Header.Get("Proxy-Authorization") != want {
		_, _ = io.WriteString(c, "HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
		return
	}
	to := req.Host
	if p.rewrite != "" {
		to = p.rewrite
	}
	out, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	p.passed.Add(1)
	var b bytes.Buffer
	b.WriteString("HTTP/1.1 200 Connection established\r\n\r\n")
	_, _ = b.WriteTo(c)
	_, _ = Relay(context.Background(), c, out, RelayOptions{})
}
