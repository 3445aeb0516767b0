package e2e

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/carrel-dev/carrel/agent/link"
	"github.com/carrel-dev/carrel/proto/stream"
	"github.com/carrel-dev/carrel/proto/stream/streamtest"
	"github.com/carrel-dev/carrel/services/tunnel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const hostID = "h1"

// rig is a gateway and the agents that a test adds to it.
type rig struct {
	tb     testing.TB
	tunnel *tunnel.Tunnel
	server *httptest.Server
	client *tls.Config // nil: plain
	events chan string

	mu       sync.Mutex
	linkConn net.Conn // of the latest dial-in
}

// spy keeps the connection that is taken over.
type spy struct {
	http.ResponseWriter
	r *rig
}

func (s spy) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, b, err := http.NewResponseController(s.ResponseWriter).Hijack()
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	s.r.linkConn = c
	return c, b, err
}

// breakLink cuts the latest link without a word to either side's program.
func (r *rig) breakLink() {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.linkConn
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	c.Close()
}

type closeWriter interface{ CloseWrite() error }

func noProxy(*http.Request) (*url.URL, error) { return nil, nil }

func newRig(tb testing.TB, secure bool, o tunnel.Options) *rig {
	r := &rig{tb: tb, events: make(chan string, 1000)}
	o.OnUp = func(host string, session int64) { r.events <- "up " + host + " " + strconv.FormatInt(session, 10) }
	o.OnDown = func(host string, session int64, _ error) {
		r.events <- "down " + host + " " + strconv.FormatInt(session, 10)
	}
	o.DialBack = r.dialBack
	r.tunnel = tunnel.New(o)
	mux := http.NewServeMux()
	mux.HandleFunc(link.LinkPath, func(w http.ResponseWriter, q *http.Request) {
		_ = r.tunnel.ServeLink(spy{w, r}, q, q.Header.Get("Host-Id"), sessionOf(q))
	})
	mux.HandleFunc(link.StreamPath, func(w http.ResponseWriter, q *http.Request) {
		_ = r.tunnel.ServeStream(w, q, q.Header.Get("Host-Id"), sessionOf(q))
	})
	mux.HandleFunc("/attach/{workspace}", r.attach)
	r.server = httptest.NewUnstartedServer(mux)
	if secure {
		r.server.TLS, r.client = streamtest.TLS(tb)
		r.server.EnableHTTP2 = true
		r.server.StartTLS()
	} else {
		r.server.Start()
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := r.tunnel.Shutdown(ctx); err != nil {
			tb.Errorf("shutdown: %v", err)
		}
		r.server.Close()
	})
	return r
}

func sessionOf(q *http.Request) int64 {
	n, _ := strconv.ParseInt(q.Header.Get("Session"), 10, 64)
	return n
}

// attach is what the gateway does with an authorised user's stream.
func (r *rig) attach(w http.ResponseWriter, q *http.Request) {
	id := q.PathValue("workspace")
	host, err := r.tunnel.Open(q.Context(), hostID, stream.Hello{Workspace: id, Kind: q.Header.Get("Kind"), Epoch: 1})
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	user, err := stream.Accept(w, q)
	if err != nil {
		host.Close()
		return
	}
	_ = r.tunnel.Go(user, host, tunnel.Who{User: "ann", Workspace: id, Host: hostID, Kind: "echo"}, nil)
}

// dialBack is the call on the link that the gateway would generate.
func (r *rig) dialBack(ctx context.Context, host string, n int) error {
	c, err := r.tunnel.Client(host)
	if err != nil {
		return err
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://host/dialback?n="+strconv.Itoa(n), http.NoBody)
	if err != nil {
		return err
	}
	resp, err := c.Do(q)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

func (r *rig) dial(kind string) (net.Conn, error) {
	conn, _, err := stream.Dial(context.Background(), stream.Options{
		URL: r.server.URL + "/attach/w1", TLS: r.client, Proxy: noProxy, Header: http.Header{"Kind": {kind}},
	})
	return conn, err
}

func (r *rig) mustDial(kind string) net.Conn {
	r.tb.Helper()
	conn, err := r.dial(kind)
	if err != nil {
		r.tb.Fatal(err)
	}
	return conn
}

// running is an agent whose Run was called.
type running struct {
	*link.Link
	cancel context.CancelFunc
	wait   func() error // returns what Run returns
}

func (a *running) stop() error {
	a.cancel()
	return a.wait()
}

// agent runs a link until it is stopped; its streams go to a backend.
func (r *rig) agent(session int64) *running {
	backend := newBackend(r.tb)
	return r.agentTo(r.server.URL, session, func(ctx context.Context, h stream.Hello, conn net.Conn) {
		inner, err := net.Dial("unix", backend.path(h.Kind))
		if err != nil {
			return
		}
		_, _ = stream.Relay(ctx, conn, inner, stream.RelayOptions{})
	})
}

func (r *rig) agentTo(gateway string, session int64, on func(context.Context, stream.Hello, net.Conn)) *running {
	var l *link.Link
	o := link.Options{
		GatewayURL: gateway,
		TLS:        r.client,
		Proxy:      noProxy,
		Header: func(context.Context, string) (http.Header, error) {
			return http.Header{"Host-Id": {hostID}, "Session": {strconv.FormatInt(session, 10)}}, nil
		},
		OnStream:   on,
		MinBackoff: 10 * time.Millisecond,
		MaxBackoff: 200 * time.Millisecond,
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/dialback", func(w http.ResponseWriter, q *http.Request) {
		n, _ := strconv.Atoi(q.FormValue("n"))
		if err := l.DialBack(n); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	o.Handler = mux
	l = link.New(o)
	ctx, cancel := context.WithCancel(context.Background())
	result := make(chan error, 1)
	go func() { result <- l.Run(ctx) }()
	a := &running{Link: l, cancel: cancel, wait: sync.OnceValue(func() error {
		select {
		case err := <-result:
			return err
		case <-time.After(15 * time.Second):
			return errors.New("agent did not stop within 15 s")
		}
	})}
	r.tb.Cleanup(func() { _ = a.stop() })
	return a
}

// expect waits for an event of the tunnel.
func (r *rig) expect(want string) {
	r.tb.Helper()
	select {
	case got := <-r.events:
		if got != want {
			r.tb.Fatalf("event %q, want %q", got, want)
		}
	case <-time.After(20 * time.Second):
		r.tb.Fatalf("no event %q within 20 s", want)
	}
}

// backend is what runs in the workspace: unix sockets, as carrel-init's.
type backend struct{ dir string }

func newBackend(tb testing.TB) *backend {
	b := &backend{dir: tb.TempDir()}
	b.serve(tb, "echo", func(c net.Conn) {
		_, _ = io.Copy(c, c)
	})
	b.serve(tb, "swap", func(c net.Conn) { // 100,000 bytes in, 300,017 back
		in, _ := io.ReadAll(c)
		if len(in) == 100_000 {
			_, _ = c.Write(noise(9, 300_017))
		}
	})
	b.serve(tb, "duplex", func(c net.Conn) {
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			_, _ = c.Write(noise(2, bulkSize))
			_ = c.(closeWriter).CloseWrite()
		}()
		_, _ = io.Copy(io.Discard, c)
		<-sent
	})
	b.serve(tb, "flood", func(c net.Conn) { // without end
		for {
			if _, err := c.Write(floodBytes); err != nil {
				return
			}
		}
	})
	b.serve(tb, "sink", func(c net.Conn) {
		n, _ := io.Copy(struct{ io.Writer }{io.Discard}, c)
		_, _ = io.WriteString(c, strconv.FormatInt(n, 10))
	})
	return b
}

func (b *backend) path(kind string) string { return b.dir + "/" + kind }

func (b *backend) serve(tb testing.TB, kind string, f func(net.Conn)) {
	l, err := net.Listen("unix", b.path(kind))
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
}

const bulkSize = 64 << 20

var floodBytes = noise(4, 64<<10)

func noise(seed byte, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// echo sends a word and wants it back.
func echo(c net.Conn, word string) error {
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, word); err != nil {
		return err
	}
	got := make([]byte, len(word))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if string(got) != word {
		return errors.New("other bytes came back: " + string(got))
	}
	return nil
}
