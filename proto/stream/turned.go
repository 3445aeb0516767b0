package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	// DefaultPingAfter is the silence on a turned connection after which it is
	// probed, DefaultPingTimeout the time for the answer: together they find a
	// dead peer in 30 s, within the 45 s of threat T-31.
	DefaultPingAfter   = 15 * time.Second
	DefaultPingTimeout = 15 * time.Second

	turnedStreams = 1000      // calls at a time that the serving side takes
	turnedWindow  = 1 << 20   // bytes in flight per call
	turnedTotal   = 4<<20 - 1 // bytes in flight to the serving side; net/http takes less than 4 MiB
	turnedFrame   = 256 << 10 // fewer hand-offs than the default, one DATA frame per message more often
	turnedAddress = "host:80" // never resolved: the connection is there already
)

// TurnedOptions set the health checks of a connection whose HTTP roles are
// turned round; the zero value is good.
type TurnedOptions struct {
	PingAfter   time.Duration // silence before a ping; 0: DefaultPingAfter
	PingTimeout time.Duration // for its answer; 0: DefaultPingTimeout
	WriteStall  time.Duration // for a write without progress; 0: DefaultWriteStall
	Log         *slog.Logger  // gets net/http's remarks at debug level; nil: nobody
}

func (o TurnedOptions) http2() *http.HTTP2Config {
	c := &http.HTTP2Config{
		MaxConcurrentStreams:      turnedStreams,
		MaxReadFrameSize:          turnedFrame,
		MaxReceiveBufferPerStream: turnedWindow,
		SendPingTimeout:           o.PingAfter,
		PingTimeout:               o.PingTimeout,
		WriteByteTimeout:          o.WriteStall,
	}
	if c.SendPingTimeout <= 0 {
		c.SendPingTimeout = DefaultPingAfter
	}
	if c.PingTimeout <= 0 {
		c.PingTimeout = DefaultPingTimeout
	}
	if c.WriteByteTimeout <= 0 {
		c.WriteByteTimeout = DefaultWriteStall
	}
	return c
}

func onlyUnencryptedHTTP2() *http.Protocols {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	return p
}

// turnedConn hides what the connection is (net/http would ask a *tls.Conn what
// it negotiated) and tells when it is closed.
type turnedConn struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

func newTurnedConn(c net.Conn) *turnedConn {
	return &turnedConn{Conn: c, closed: make(chan struct{})}
}

func (c *turnedConn) Close() error {
	err := net.ErrClosed
	c.once.Do(func() {
		// The connection under TLS first: a close_notify could wait for a
		// peer that is gone. HTTP/2 has its own goodbye.
		err = bottom(c.Conn).Close()
		close(c.closed)
	})
	return err
}

// ErrTurnedEnded is what ServeTurned returns when the connection ends.
var ErrTurnedEnded = errors.New("stream: turned connection ended")

// ServeTurned serves h on conn, which this side has dialled, until conn or ctx
// ends; it returns when the last call has. Calls see their context end with
// the connection. The error is the cause of ctx, or ErrTurnedEnded.
func ServeTurned(ctx context.Context, conn net.Conn, h http.Handler, o TurnedOptions) error {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	tc := newTurnedConn(conn)
	calls := &callGate{next: h}
	cfg := o.http2()
	cfg.MaxReceiveBufferPerConnection = turnedTotal
	over := make(chan struct{})
	srv := &http.Server{
		Handler:     calls,
		Protocols:   onlyUnencryptedHTTP2(),
		HTTP2:       cfg,
		BaseContext: func(net.Listener) context.Context { return context.WithoutCancel(ctx) },
		ErrorLog:    slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateClosed {
				close(over)
			}
		},
	}
	// For the peer's first words; net/http takes it off afterwards.
	if err := tc.SetReadDeadline(time.Now().Add(cfg.SendPingTimeout + cfg.PingTimeout)); err != nil {
		_ = tc.Close()
		return fmt.Errorf("%w: %w", ErrTurnedEnded, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = tc.Close() })
	defer stop()
	err := srv.Serve(&oneListener{conn: tc, done: over})
	<-over // the listener gives the connection out before it can fail
	_ = tc.Close()
	calls.wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("%w: %w", ErrTurnedEnded, err)
}

// oneListener accepts one connection, and then nothing until that has ended.
type oneListener struct {
	conn net.Conn
	mu   sync.Mutex
	gone bool
	done <-chan struct{}
}

func (l *oneListener) Accept() (net.Conn, error) {
	l.mu.Lock()
	first := !l.gone
	l.gone = true
	l.mu.Unlock()
	if first {
		return l.conn, nil
	}
	<-l.done
	return nil, net.ErrClosed
}

func (l *oneListener) Close() error   { return nil }
func (l *oneListener) Addr() net.Addr { return l.conn.LocalAddr() }

// callGate knows which calls are running: http.Server does not wait for those
// of HTTP/2.
type callGate struct {
	next http.Handler

	mu      sync.Mutex
	shut    bool
	running sync.WaitGroup
}

func (g *callGate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	if g.shut {
		g.mu.Unlock()
		return
	}
	g.running.Add(1)
	g.mu.Unlock()
	defer g.running.Done()
	g.next.ServeHTTP(w, r)
}

func (g *callGate) wait() {
	g.mu.Lock()
	g.shut = true
	g.mu.Unlock()
	g.running.Wait()
}

// Turned is an http.RoundTripper over one connection on which the other side,
// which dialled it, serves (ServeTurned).
type Turned struct {
	conn *turnedConn
	cc   *http.ClientConn
}

// NewTurnedTransport takes conn over. It fails only where conn is dead already.
func NewTurnedTransport(conn net.Conn, o TurnedOptions) (*Turned, error) {
	tc := newTurnedConn(conn)
	t := &http.Transport{
		Protocols:          onlyUnencryptedHTTP2(),
		HTTP2:              o.http2(),
		DisableCompression: true,
		DialContext:        func(context.Context, string, string) (net.Conn, error) { return tc, nil },
	}
	cc, err := t.NewClientConn(context.Background(), "http", turnedAddress)
	if err != nil {
		_ = tc.Close()
		return nil, fmt.Errorf("begin HTTP/2: %w", err)
	}
	return &Turned{conn: tc, cc: cc}, nil
}

// RoundTrip sends the request over the connection whatever its address says.
func (t *Turned) RoundTrip(r *http.Request) (*http.Response, error) { return t.cc.RoundTrip(r) }

// Done is closed when the connection has ended, whoever ended it.
func (t *Turned) Done() <-chan struct{} { return t.conn.closed }

// Close ends the connection and every call on it.
func (t *Turned) Close() error {
	_ = t.cc.Close() // may leave the connection open for calls that run
	_ = t.conn.Close()
	return nil
}
