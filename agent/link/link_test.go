package link

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/carrel-dev/carrel/proto/stream"
	"github.com/carrel-dev/carrel/proto/stream/streamtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// gateway takes links and streams, or answers them with a status.
type gateway struct {
	url     string
	link    atomic.Int64 // status; 0: 101
	stream  atomic.Int64
	dials   atomic.Int64 // of the link
	streams chan net.Conn

	mu    sync.Mutex
	links []*stream.Turned
}

func newGateway(t *testing.T) *gateway {
	g := &gateway{streams: make(chan net.Conn, 1000)}
	mux := http.NewServeMux()
	mux.HandleFunc(LinkPath, func(w http.ResponseWriter, r *http.Request) {
		g.dials.Add(1)
		if code := g.link.Load(); code != 0 {
			http.Error(w, "because", int(code))
			return
		}
		conn, err := stream.Accept(w, r)
		if err != nil {
			return
		}
		tr, err := stream.NewTurnedTransport(conn, stream.TurnedOptions{})
		if err != nil {
			return
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.links = append(g.links, tr)
	})
	mux.HandleFunc(StreamPath, func(w http.ResponseWriter, r *http.Request) {
		if code := g.stream.Load(); code != 0 {
			http.Error(w, "because", int(code))
			return
		}
		if r.Header.Get("Authorization") != "me" {
			http.Error(w, "who?", http.StatusUnauthorized)
			return
		}
		if conn, err := stream.Accept(w, r); err == nil {
			g.streams <- conn
		}
	})
	s := httptest.NewServer(mux)
	g.url = s.URL
	t.Cleanup(func() {
		g.breakLinks()
		s.Close()
		for len(g.streams) > 0 {
			(<-g.streams).Close()
		}
	})
	return g
}

func (g *gateway) breakLinks() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, l := range g.links {
		l.Close()
	}
	g.links = nil
}

func (g *gateway) options() Options {
	return Options{
		GatewayURL: g.url + "/",
		Header:     func(context.Context, string) (http.Header, error) { return http.Header{"Authorization": {"me"}}, nil },
		Proxy:      func(*http.Request) (*url.URL, error) { return nil, nil },
		Handler:    http.NotFoundHandler(),
		OnStream:   func(context.Context, stream.Hello, net.Conn) {},
		MinBackoff: time.Millisecond,
		MaxBackoff: 20 * time.Millisecond,
	}
}

// start runs l; wait returns Run's result.
func start(t *testing.T, o Options) (l *Link, cancel context.CancelFunc, wait func() error) {
	l = New(o)
	ctx, cancel := context.WithCancel(context.Background())
	result := make(chan error, 1)
	go func() { result <- l.Run(ctx) }()
	wait = sync.OnceValue(func() error {
		select {
		case err := <-result:
			return err
		case <-time.After(15 * time.Second):
			t.Error("Run did not return within 15 s")
			return nil
		}
	})
	t.Cleanup(func() { cancel(); _ = wait() })
	return l, cancel, wait
}

func TestRunStopsWhereItIsNotWanted(t *testing.T) {
	for code, want := range map[int64]error{409: ErrNewerSession, 403: ErrRefused} {
		g := newGateway(t)
		g.link.Store(code)
		l, _, wait := start(t, g.options())
		err := wait()
		var se *stream.StatusError
		if !errors.Is(err, want) || !errors.As(err, &se) || se.Body != "because\n" {
			t.Errorf("%d: %v", code, err)
		}
		if s := l.State(); s.Connected || !errors.Is(s.LastError, want) || s.LastErrorAt.IsZero() {
			t.Errorf("%d: %+v", code, s)
		}
	}
}

func TestRunStopsWhenAStreamLearnsOfANewerSession(t *testing.T) {
	g := newGateway(t)
	g.stream.Store(409)
	_, _, wait := start(t, g.options())
	if err := wait(); !errors.Is(err, ErrNewerSession) {
		t.Error(err)
	}
}

func TestRunTriesUntilTheGatewayIsBack(t *testing.T) {
	g := newGateway(t)
	g.link.Store(503)
	l, cancel, wait := start(t, g.options())
	streamtest.Eventually(t, "several tries", func() bool { return g.dials.Load() > 3 })
	g.link.Store(401) // it has forgotten its challenges
	streamtest.Eventually(t, "several more", func() bool { return g.dials.Load() > 6 })
	if s := l.State(); s.Failures < 3 || s.LastError == nil {
		t.Errorf("%+v", s)
	}
	g.link.Store(0)
	streamtest.Eventually(t, "pool is full", func() bool { return l.State().Ready == DefaultStreams })
	if s := l.State(); !s.Connected || s.Since.IsZero() || s.Failures != 0 {
		t.Errorf("%+v", s)
	}
	g.breakLinks()
	streamtest.Eventually(t, "it comes back", func() bool { return l.State().LastError != nil && l.State().Ready == DefaultStreams })
	cancel()
	if err := wait(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if s := l.State(); s.Connected || s.Ready+s.Active != 0 {
		t.Errorf("%+v", s)
	}
}

func TestAFlappingGatewayIsNotHammered(t *testing.T) {
	g := newGateway(t)
	o := g.options()
	o.MinBackoff, o.MaxBackoff = 50*time.Millisecond, time.Hour
	start(t, o)
	deadline := time.Now().Add(time.Second)
	for time.Now().Before(deadline) {
		g.breakLinks()
		time.Sleep(time.Millisecond) //nolint:forbidigo // the pace of the flapping, not a wait for anything
	}
	// Doubling from 50 ms, ten dials would take 25 s on average.
	if n := g.dials.Load(); n < 1 || n > 20 {
		t.Errorf("%d dials in a second", n)
	}
}

func TestPoolIsKeptFilled(t *testing.T) {
	g := newGateway(t)
	o := g.options()
	o.Streams = 2
	got := make(chan stream.Hello, 100)
	o.OnStream = func(ctx context.Context, h stream.Hello, c net.Conn) {
		got <- h
		_, _ = io.Copy(c, c)
	}
	l, cancel, wait := start(t, o)
	var used []net.Conn
	for i := range 10 {
		c := <-g.streams
		used = append(used, c)
		if err := stream.WriteHello(c, stream.Hello{Workspace: "w", Epoch: int64(i)}); err != nil {
			t.Fatal(err)
		}
		if h := <-got; h.Epoch != int64(i) {
			t.Fatalf("hello %+v", h)
		}
	}
	streamtest.Eventually(t, "two ready, ten in use", func() bool {
		s := l.State()
		return s.Ready == 2 && s.Active == 10
	})
	g.breakLinks()
	streamtest.Eventually(t, "the link is back", func() bool { return g.dials.Load() == 2 && l.State().Ready == 2 })
	if _, err := used[0].Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(used[0], make([]byte, 1)); err != nil {
		t.Errorf("a stream in use went with the link: %v", err)
	}
	cancel()
	for _, c := range used {
		c.Close()
	}
	_ = wait()
}

func TestDialBackIsBounded(t *testing.T) {
	g := newGateway(t)
	o := g.options()
	o.Streams, o.MaxExtra = 1, 3
	l := New(o)
	if err := l.DialBack(1); err == nil {
		t.Error("without a link")
	}
	l, _, _ = start(t, o)
	streamtest.Eventually(t, "ready", func() bool { return l.State().Ready == 1 })
	for _, n := range []int{0, -1} {
		if err := l.DialBack(n); err == nil {
			t.Errorf("%d streams", n)
		}
	}
	if err := l.DialBack(1 << 30); !errors.Is(err, ErrBusy) {
		t.Errorf("%v", err)
	}
	if err := l.DialBack(3); err != nil {
		t.Fatal(err)
	}
	streamtest.Eventually(t, "more are ready", func() bool { return l.State().Ready == 4 })
	if err := l.DialBack(1); !errors.Is(err, ErrBusy) {
		t.Errorf("%v", err)
	}
	// Those beyond what is kept ready are not replaced when they end.
	for len(g.streams) > 0 {
		(<-g.streams).Close()
	}
	streamtest.Eventually(t, "one is ready", func() bool { return l.State().Ready == 1 && len(g.streams) == 1 })
}

func TestABadStreamHarmsNoOther(t *testing.T) {
	g := newGateway(t)
	o := g.options()
	o.Streams, o.HelloTimeout = 2, 50*time.Millisecond
	done := make(chan string, 100)
	o.OnStream = func(_ context.Context, h stream.Hello, _ net.Conn) {
		done <- h.Kind
		if h.Kind == "bad" {
			panic("handler's fault")
		}
	}
	l, _, _ := start(t, o)
	for _, first := range []string{"SSH-2.0-nonsense\r\n", "C", ""} { // garbage, half a hello, nothing
		c := <-g.streams
		if first == "" {
			c.Close()
			continue
		}
		if _, err := io.WriteString(c, first); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%q: %v", first, err)
		}
		c.Close()
	}
	for _, kind := range []string{"bad", "good", "bad", "good"} {
		c := <-g.streams
		defer c.Close()
		if err := stream.WriteHello(c, stream.Hello{Kind: kind}); err != nil {
			t.Fatal(err)
		}
		if got := <-done; got != kind {
			t.Fatalf("%s", got)
		}
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("stream was not closed")
		}
	}
	streamtest.Eventually(t, "all is as before", func() bool { return l.State().Ready == 2 && l.State().Active == 0 })
}

func TestRunWaitsForItsStreams(t *testing.T) {
	g := newGateway(t)
	o := g.options()
	entered, ended := make(chan struct{}), make(chan struct{})
	o.OnStream = func(ctx context.Context, _ stream.Hello, _ net.Conn) {
		close(entered)
		<-ctx.Done()
		close(ended)
	}
	_, cancel, wait := start(t, o)
	if err := stream.WriteHello(<-g.streams, stream.Hello{Kind: "x"}); err != nil {
		t.Fatal(err)
	}
	<-entered
	cancel()
	_ = wait()
	select {
	case <-ended:
	default:
		t.Error("Run returned before its stream")
	}
}

func TestBackoffIsJitteredAndBounded(t *testing.T) {
	var b backoff
	var most time.Duration
	for i := range 200 {
		d := b.next(250*time.Millisecond, 8*time.Second)
		if bound := min(8*time.Second, 250*time.Millisecond<<min(i, 20)); d <= 0 || d > bound+time.Millisecond {
			t.Fatalf("try %d: %v", i, d)
		}
		most = max(most, d)
	}
	if most < 4*time.Second {
		t.Errorf("never more than %v", most)
	}
	b.reset()
	if d := b.next(time.Millisecond, time.Hour); d > 2*time.Millisecond {
		t.Errorf("after reset: %v", d)
	}
}
