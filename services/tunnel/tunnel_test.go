package tunnel

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/carrel-dev/carrel/proto/stream"
	"github.com/carrel-dev/carrel/proto/stream/streamtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// gateway is a Tunnel behind a server that believes what a host says it is.
type gateway struct {
	t      *testing.T
	tunnel *Tunnel
	url    string
	ended  chan error // results of ServeLink
}

func newGateway(t *testing.T, o Options) *gateway {
	g := &gateway{t: t, tunnel: New(o), ended: make(chan error, 100)}
	mux := http.NewServeMux()
	mux.HandleFunc("/link/{host}/{session}", func(w http.ResponseWriter, r *http.Request) {
		session, _ := strconv.ParseInt(r.PathValue("session"), 10, 64)
		g.ended <- g.tunnel.ServeLink(w, r, r.PathValue("host"), session)
	})
	mux.HandleFunc("/stream/{host}/{session}", func(w http.ResponseWriter, r *http.Request) {
		session, _ := strconv.ParseInt(r.PathValue("session"), 10, 64)
		_ = g.tunnel.ServeStream(w, r, r.PathValue("host"), session)
	})
	s := httptest.NewServer(mux)
	g.url = s.URL
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := g.tunnel.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		s.Close()
	})
	return g
}

func (g *gateway) dial(path string) (net.Conn, error) {
	c, _, err := stream.Dial(context.Background(), stream.Options{
		URL: g.url + path, Proxy: func(*http.Request) (*url.URL, error) { return nil, nil },
	})
	return c, err
}

// host brings a host's link up and serves h on it.
func (g *gateway) host(path string, h http.Handler) net.Conn {
	g.t.Helper()
	conn, err := g.dial("/link/" + path)
	if err != nil {
		g.t.Fatal(err)
	}
	var served sync.WaitGroup
	served.Go(func() { _ = stream.ServeTurned(context.Background(), conn, h, stream.TurnedOptions{}) })
	g.t.Cleanup(func() { conn.Close(); served.Wait() })
	return conn
}

func (g *gateway) up(path string) net.Conn {
	g.t.Helper()
	hosts := g.tunnel.Stats().Hosts
	c := g.host(path, http.NotFoundHandler())
	streamtest.Eventually(g.t, "host is up", func() bool { return g.tunnel.Stats().Hosts > hosts })
	return c
}

// pool dials a stream for the pool and waits until it lies there.
func (g *gateway) pool(path string) net.Conn {
	g.t.Helper()
	before := g.tunnel.Stats().Pooled
	c, err := g.dial("/stream/" + path)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { c.Close() })
	streamtest.Eventually(g.t, "stream is pooled", func() bool { return g.tunnel.Stats().Pooled > before })
	return c
}

func code(err error) int {
	var se *stream.StatusError
	if errors.As(err, &se) {
		return se.Code
	}
	return 0
}

var hello = stream.Hello{Workspace: "w1", Epoch: 2, Kind: "ssh"}

func wantHello(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	got, err := stream.ReadHello(c)
	got.Version = 0
	if err != nil || got != hello {
		t.Fatalf("hello %+v, %v", got, err)
	}
}

func TestOpenTakesThePooledStreamThatLives(t *testing.T) {
	g := newGateway(t, Options{})
	g.up("h/1")
	alive := g.pool("h/1")
	spoke := g.pool("h/1") // fresher ones, so tried first
	for _, c := range []net.Conn{g.pool("h/1"), g.pool("h/1")} {
		c.Close()
	}
	if _, err := spoke.Write([]byte("out of turn")); err != nil {
		t.Fatal(err)
	}
	streamtest.Eventually(t, "the gateway's kernel knows", func() bool {
		g.tunnel.mu.Lock()
		defer g.tunnel.mu.Unlock()
		quiet := 0
		for _, p := range g.tunnel.hosts["h"].pool {
			if stream.Quiet(p.conn) {
				quiet++
			}
		}
		return quiet == 1
	})
	conn, err := g.tunnel.Open(t.Context(), "h", hello)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	wantHello(t, alive)
	if s := g.tunnel.Stats(); s.Pooled != 0 {
		t.Errorf("dead ones are kept: %+v", s)
	}
}

func TestOpenAsksForAStreamWhenNoneIsIdle(t *testing.T) {
	dialled := make(chan net.Conn, 10)
	var g *gateway
	g = newGateway(t, Options{DialBack: func(_ context.Context, host string, n int) error {
		c, err := g.dial("/stream/" + host + "/1")
		dialled <- c
		return err
	}})
	g.up("h/1")
	for range 3 {
		conn, err := g.tunnel.Open(t.Context(), "h", hello)
		if err != nil {
			t.Fatal(err)
		}
		c := <-dialled
		wantHello(t, c)
		c.Close()
		conn.Close()
	}
}

func TestOpenFailsWithTheReason(t *testing.T) {
	broken := errors.New("agent says no")
	var fail atomic.Bool
	g := newGateway(t, Options{
		OpenTimeout: 100 * time.Millisecond,
		MaxWaiting:  1,
		DialBack: func(ctx context.Context, _ string, _ int) error {
			if fail.Load() {
				return broken
			}
			<-ctx.Done() // an agent that hangs
			return ctx.Err()
		},
	})
	if _, err := g.tunnel.Open(t.Context(), "h", hello); !errors.Is(err, ErrHostAway) {
		t.Errorf("no host: %v", err)
	}
	link := g.up("h/1")
	if _, err := g.tunnel.Open(t.Context(), "h", hello); !errors.Is(err, ErrNoStream) {
		t.Errorf("timeout: %v", err)
	}
	if _, err := g.tunnel.Open(t.Context(), "h", stream.Hello{Epoch: -1}); !errors.Is(err, stream.ErrBadHello) {
		t.Errorf("bad hello: %v", err)
	}
	fail.Store(true)
	if _, err := g.tunnel.Open(t.Context(), "h", hello); !errors.Is(err, broken) {
		t.Errorf("dial back: %v", err)
	}
	fail.Store(false)

	g.tunnel.o.OpenTimeout = 20 * time.Second // the rest must not need it
	first := make(chan error, 1)
	go func() {
		_, err := g.tunnel.Open(t.Context(), "h", hello)
		first <- err
	}()
	streamtest.Eventually(t, "one waits", func() bool {
		g.tunnel.mu.Lock()
		defer g.tunnel.mu.Unlock()
		return len(g.tunnel.hosts["h"].waiters) == 1
	})
	if _, err := g.tunnel.Open(t.Context(), "h", hello); !errors.Is(err, ErrTooMany) {
		t.Errorf("two wait: %v", err)
	}
	link.Close()
	if err := <-first; !errors.Is(err, ErrHostAway) {
		t.Errorf("host left: %v", err)
	}
	g.up("h/1")
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("user went")
	time.AfterFunc(20*time.Millisecond, func() { cancel(gone) })
	if _, err := g.tunnel.Open(ctx, "h", hello); !errors.Is(err, gone) {
		t.Errorf("user left: %v", err)
	}
}

func TestStreamsAreRefusedWithACode(t *testing.T) {
	g := newGateway(t, Options{PoolSize: 2})
	if _, err := g.dial("/stream/h/1"); code(err) != 503 {
		t.Errorf("no link: %v", err)
	}
	g.up("h/5")
	g.pool("h/5")
	g.pool("h/0") // session unknown
	if _, err := g.dial("/stream/h/5"); code(err) != 429 {
		t.Errorf("full: %v", err)
	}
	if _, err := g.dial("/stream/h/4"); code(err) != 409 {
		t.Errorf("old session: %v", err)
	}
	if _, err := g.dial("/link/h/4"); code(err) != 409 {
		t.Errorf("old link: %v", err)
	}
}

func TestNewerLinkDropsTheOldOnesStreams(t *testing.T) {
	g := newGateway(t, Options{})
	g.up("h/1")
	old := g.pool("h/1")
	g.host("h/2", http.NotFoundHandler())
	if err := <-g.ended; !errors.Is(err, ErrNewerSession) {
		t.Errorf("old link ended with %v", err)
	}
	_ = old.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := old.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("old stream: %v", err)
	}
	fresh := g.pool("h/2")
	conn, err := g.tunnel.Open(t.Context(), "h", hello)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	wantHello(t, fresh)
}

func TestUpAndDownComeInOrder(t *testing.T) {
	var mu sync.Mutex
	var events []string
	note := func(s string) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, s)
	}
	g := newGateway(t, Options{
		OnUp:   func(h string, s int64) { note("up" + strconv.FormatInt(s, 10)) },
		OnDown: func(h string, s int64, _ error) { note("down" + strconv.FormatInt(s, 10)) },
	})
	for range 30 {
		g.up("h/1").Close()
		if err := <-g.ended; !errors.Is(err, ErrHostAway) {
			t.Fatalf("ended with %v", err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	for i, e := range events {
		if want := []string{"up1", "down1"}[i%2]; e != want {
			t.Fatalf("event %d is %s", i, e)
		}
	}
	if len(events) != 60 {
		t.Fatalf("%d events", len(events))
	}
}

func TestAHostThatIsNotAdmittedIsNotUp(t *testing.T) {
	wrong := errors.New("wrong signature")
	g := newGateway(t, Options{
		OnUp: func(string, int64) { t.Error("up") },
		Admit: func(ctx context.Context, host string, session int64, rt http.RoundTripper) error {
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://host/prove", http.NoBody)
			if err != nil {
				return err
			}
			resp, err := rt.RoundTrip(r)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			if host != "h" || session != 3 || resp.StatusCode != http.StatusTeapot {
				t.Errorf("%s %d %s", host, session, resp.Status)
			}
			return wrong
		},
	})
	g.host("h/3", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	if err := <-g.ended; !errors.Is(err, wrong) {
		t.Errorf("ended with %v", err)
	}
	if _, err := g.tunnel.Client("h"); !errors.Is(err, ErrHostAway) {
		t.Errorf("client: %v", err)
	}
	if _, err := g.dial("/stream/h/3"); code(err) != 503 {
		t.Errorf("stream: %v", err)
	}
}

func TestClientFollowsTheHost(t *testing.T) {
	g := newGateway(t, Options{})
	if _, err := g.tunnel.Client("h"); !errors.Is(err, ErrHostAway) {
		t.Errorf("%v", err)
	}
	link := g.up("h/1")
	c, err := g.tunnel.Client("h")
	if err != nil {
		t.Fatal(err)
	}
	call := func() error {
		resp, err := c.Get("http://host/")
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	if err := call(); err != nil {
		t.Fatal(err)
	}
	link.Close()
	<-g.ended
	if err := call(); !errors.Is(err, ErrHostAway) {
		t.Errorf("without link: %v", err)
	}
	g.up("h/1")
	if err := call(); err != nil {
		t.Errorf("after its return: %v", err)
	}
}

func TestLiveSetIsClosedByWhoItIs(t *testing.T) {
	tn := New(Options{MaxPerUser: 3})
	revoked := errors.New("revoked")
	closed := map[string]error{}
	track := func(name string, w Who) func() {
		release, err := tn.Track(w, func(err error) { closed[name] = err })
		if err != nil {
			t.Fatal(err)
		}
		return release
	}
	track("a1", Who{User: "ann", Token: "t1", Workspace: "w1", Host: "h1"})
	track("a2", Who{User: "ann", Token: "t2", Workspace: "w1", Host: "h1"})
	track("b1", Who{User: "bob", Token: "t3", Workspace: "w2", Host: "h1"})
	release := track("a3", Who{User: "ann", Token: "t1", Workspace: "w2", Host: "h2"})
	if _, err := tn.Track(Who{User: "ann"}, nil); !errors.Is(err, ErrTooMany) {
		t.Errorf("a fourth: %v", err)
	}
	if l := tn.Live("w1"); l.Streams != 2 {
		t.Errorf("w1: %+v", l)
	}
	for _, c := range []struct {
		n    int
		want int
		by   string
	}{
		{tn.CloseToken("t1", revoked), 2, "token"},
		{tn.CloseWorkspace("w2", revoked), 2, "workspace"},
		{tn.CloseUser("bob", revoked), 1, "user"},
		{tn.CloseHost("h2", revoked), 1, "host"},
		{tn.CloseUser("", revoked), 0, "nobody"},
	} {
		if c.n != c.want {
			t.Errorf("%s: %d closed, want %d", c.by, c.n, c.want)
		}
	}
	if len(closed) != 3 || closed["a1"] != revoked || closed["a2"] != nil {
		t.Errorf("closed: %v", closed)
	}
	release()
	release() // twice is once
	if s := tn.Stats(); s.Streams != 3 || s.Opened != 4 {
		t.Errorf("%+v", s)
	}
	if _, err := tn.Track(Who{User: "ann"}, func(error) {}); err != nil {
		t.Errorf("after a release: %v", err)
	}
	if err := tn.Shutdown(t.Context()); err != nil || closed["a2"] != ErrShutdown {
		t.Errorf("shutdown: %v, %v", err, closed)
	}
	if _, err := tn.Track(Who{}, nil); !errors.Is(err, ErrShutdown) {
		t.Errorf("after shutdown: %v", err)
	}
}

func TestShutdownEndsEverythingAndRefusesTheRest(t *testing.T) {
	g := newGateway(t, Options{DialBack: func(ctx context.Context, _ string, _ int) error {
		<-ctx.Done()
		return ctx.Err()
	}})
	g.up("h/1")
	idle := g.pool("h/1")
	a, b := net.Pipe()
	c, d := net.Pipe()
	joined := make(chan error, 1)
	if err := g.tunnel.Go(b, c, Who{User: "u"}, func(_ stream.Stats, err error) { joined <- err }); err != nil {
		t.Fatal(err)
	}
	if err := g.tunnel.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{"link": <-g.ended, "joined": <-joined} {
		if !errors.Is(err, ErrShutdown) {
			t.Errorf("%s ended with %v", name, err)
		}
	}
	_ = idle.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := idle.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("idle stream: %v", err)
	}
	for _, path := range []string{"/link/h/1", "/stream/h/1"} {
		if _, err := g.dial(path); code(err) != 503 {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := g.tunnel.Go(a, d, Who{}, nil); !errors.Is(err, ErrShutdown) {
		t.Errorf("go: %v", err)
	}
	if _, err := g.tunnel.Open(t.Context(), "h", hello); !errors.Is(err, ErrShutdown) {
		t.Errorf("open: %v", err)
	}
}

// T-27, R-11: what many waiting callers and a flapping host leave behind.
func TestManyCallersAndAFlappingHost(t *testing.T) {
	var g *gateway
	var conns sync.Map
	g = newGateway(t, Options{
		OpenTimeout: 2 * time.Second,
		DialBack: func(_ context.Context, host string, _ int) error {
			c, err := g.dial("/stream/" + host + "/1")
			if err == nil {
				conns.Store(c, true)
			}
			return err
		},
	})
	var callers sync.WaitGroup
	stop := make(chan struct{})
	callers.Go(func() {
		defer close(stop)
		for range 10 {
			g.up("h/1").Close()
			<-g.ended
		}
		g.up("h/1")
	})
	for range 8 {
		callers.Go(func() {
			for {
				conn, err := g.tunnel.Open(t.Context(), "h", hello)
				if err == nil {
					conn.Close()
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	callers.Wait()
	g.tunnel.mu.Lock()
	h := g.tunnel.hosts["h"]
	waiters, reserved, arriving := len(h.waiters), h.reserved, h.arriving
	g.tunnel.mu.Unlock()
	if waiters+reserved+arriving != 0 {
		t.Errorf("left: %d waiters, %d reserved, %d arriving", waiters, reserved, arriving)
	}
	conns.Range(func(c, _ any) bool { c.(net.Conn).Close(); return true })
}
