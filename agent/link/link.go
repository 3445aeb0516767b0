// Package link is the agent's connection to the gateway: it dials out, serves calls on what it dialled, and keeps byte streams ready.
package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/proto/stream"
)

// Paths of the gateway that an agent upgrades on.
const (
	LinkPath   = "/carrel/link"
	StreamPath = "/carrel/stream"
)

// Why Run stopped for good, other than for its context.
var (
	ErrNewerSession = errors.New("link: a newer session of this host has taken its place")
	ErrRefused      = errors.New("link: the gateway refuses this host")
)

// ErrBusy is DialBack's answer where as many streams as allowed wait already.
var ErrBusy = errors.New("link: too many streams wait already")

// Defaults of Options.
const (
	DefaultStreams      = 4
	DefaultMaxExtra     = 64
	DefaultDialTimeout  = 5 * time.Second // with MaxBackoff: back within 15 s of the network
	DefaultMinBackoff   = 250 * time.Millisecond
	DefaultMaxBackoff   = 8 * time.Second
	DefaultHelloTimeout = 10 * time.Second
)

// Options are the settings and hooks of a Link. A zero setting stands for its
// default.
type Options struct {
	GatewayURL string      // https://HOST[:PORT], or http://
	TLS        *tls.Config // for https; nil trusts the system's roots
	// Header makes what is sent with each dial of a path: who this host is; may be nil.
	Header func(ctx context.Context, path string) (http.Header, error)
	// OnLink gets the header of the gateway's answer to each new link, before streams are dialled; may be nil.
	OnLink func(http.Header)
	Proxy  func(*http.Request) (*url.URL, error)

	// Handler is served to the gateway over each link.
	Handler http.Handler
	// OnStream is given each stream once its hello has come. The connection is
	// closed when it returns, which it must soon after ctx ends: ctx is that of
	// Run, not of a link, for streams outlive links.
	OnStream func(ctx context.Context, hello stream.Hello, conn net.Conn)

	Streams      int           // streams kept ready
	MaxExtra     int           // streams that may wait beyond those, by DialBack
	MinBackoff   time.Duration // upper bound of the first wait after a failure
	MaxBackoff   time.Duration // upper bound of every wait
	DialTimeout  time.Duration // from the first packet to the 101
	HelloTimeout time.Duration // from a hello's first byte to its last
	Turned       stream.TurnedOptions
	Log          *slog.Logger
}

func (o Options) withDefaults() Options {
	setDefault(&o.Streams, DefaultStreams)
	setDefault(&o.MaxExtra, DefaultMaxExtra)
	setDefault(&o.MinBackoff, DefaultMinBackoff)
	setDefault(&o.MaxBackoff, DefaultMaxBackoff)
	setDefault(&o.DialTimeout, DefaultDialTimeout)
	setDefault(&o.HelloTimeout, DefaultHelloTimeout)
	if o.Header == nil {
		o.Header = func(context.Context, string) (http.Header, error) { return nil, nil }
	}
	if o.OnLink == nil {
		o.OnLink = func(http.Header) {}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.GatewayURL = strings.TrimRight(o.GatewayURL, "/")
	return o
}

func setDefault[T int | time.Duration](p *T, def T) {
	if *p <= 0 {
		*p = def
	}
}

// State is what `doctor` tells of a link.
type State struct {
	Connected   bool
	Since       time.Time // of the present link; zero without one
	LastError   error     // of the latest failure; nil before the first
	LastErrorAt time.Time
	Failures    int // dials of the link that failed since the last that did not
	Ready       int // streams that wait for a hello
	Active      int // streams in use
}

// Link is one agent's connection to its gateway.
type Link struct {
	o Options

	mu    sync.Mutex
	state State
	pool  *pool // of the present link; nil without one

	streams sync.WaitGroup // OnStream calls; Add only by what Run waits for
}

// New returns a Link that Run brings up.
func New(o Options) *Link { return &Link{o: o.withDefaults()} }

// Run keeps the link up until ctx ends, then returns its cause; it returns
// earlier, with an error that wraps ErrNewerSession or ErrRefused, where the
// gateway does not want this host. All that it started, OnStream too, has
// ended by then. It is called once.
func (l *Link) Run(ctx context.Context) error {
	// Streams end with Run, whatever it ends for.
	ctx, cancel := context.WithCancelCause(ctx)
	defer l.streams.Wait()
	defer cancel(context.Canceled)
	var b backoff
	for {
		lived, err := l.connect(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		l.failed(err)
		if errors.Is(err, ErrNewerSession) || errors.Is(err, ErrRefused) {
			l.o.Log.Error("gateway does not want this host", "err", err)
			return err
		}
		if lived >= l.o.MaxBackoff {
			b.reset()
		}
		wait := b.next(l.o.MinBackoff, l.o.MaxBackoff)
		l.o.Log.Warn("link is down", "err", err, "lived", lived, "retry", wait)
		if !sleep(ctx, wait) {
			return context.Cause(ctx)
		}
	}
}

// connect dials once and serves until that link ends. It returns how long it
// lived and why it ended.
func (l *Link) connect(ctx context.Context) (time.Duration, error) {
	conn, answer, err := l.dial(ctx, LinkPath)
	if err != nil {
		return 0, err
	}
	l.o.OnLink(answer)
	defer func() { _ = conn.Close() }()
	up := time.Now()
	p := newPool(ctx, l)
	defer p.cancel(nil)
	l.connected(up, p)
	defer l.disconnected()
	l.o.Log.Info("link is up", "gateway", l.o.GatewayURL)

	p.fill()
	//nolint:contextcheck // p.ctx comes from ctx; a stream's ErrNewerSession ends it too
	err = stream.ServeTurned(p.ctx, conn, l.o.Handler, l.o.Turned)
	p.cancel(err)
	p.wait()
	return time.Since(up), err
}

// dial upgrades on path and turns the refusals that end Run into their errors.
func (l *Link) dial(ctx context.Context, path string) (net.Conn, http.Header, error) {
	header, err := l.o.Header(ctx, path)
	if err != nil {
		return nil, nil, fmt.Errorf("prove this host to %s: %w", l.o.GatewayURL, err)
	}
	conn, answer, err := stream.Dial(ctx, stream.Options{
		URL:     l.o.GatewayURL + path,
		Header:  header,
		TLS:     l.o.TLS,
		Proxy:   l.o.Proxy,
		Timeout: l.o.DialTimeout,
	})
	var se *stream.StatusError
	if errors.As(err, &se) {
		switch se.Code {
		case http.StatusConflict:
			return nil, nil, fmt.Errorf("%w: %w", ErrNewerSession, err)
		case http.StatusForbidden: // 401 is tried again: a gateway that restarts forgets its challenges
			return nil, nil, fmt.Errorf("%w: %w", ErrRefused, err)
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("dial %s%s: %w", l.o.GatewayURL, path, err)
	}
	return conn, answer, nil
}

// DialBack makes the agent dial n more streams and returns without waiting for
// them. It fails without a link, and with ErrBusy above MaxExtra.
func (l *Link) DialBack(n int) error {
	l.mu.Lock()
	p := l.pool
	l.mu.Unlock()
	if p == nil {
		return errors.New("link: not connected")
	}
	return p.more(n)
}

// State returns the present state.
func (l *Link) State() State {
	l.mu.Lock()
	s, p := l.state, l.pool
	l.mu.Unlock()
	if p != nil {
		s.Ready = p.ready()
	}
	return s
}

func (l *Link) connected(at time.Time, p *pool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Connected, l.state.Since, l.state.Failures, l.pool = true, at, 0, p
}

func (l *Link) disconnected() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Connected, l.state.Since, l.pool = false, time.Time{}, nil
}

func (l *Link) failed(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.LastError, l.state.LastErrorAt = err, time.Now()
	l.state.Failures++
}

func (l *Link) active(by int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Active += by
}
