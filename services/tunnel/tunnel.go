// Package tunnel is the gateway's hold on the hosts that dialled in: calls to them, byte streams to them, and the live set of users' streams.
package tunnel

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/proto/stream"
)

// Why something was refused or ended. All but ErrNewerSession pass with time:
// the caller maps them to "unavailable".
var (
	ErrHostAway     = errors.New("tunnel: host is not connected")
	ErrNoStream     = errors.New("tunnel: host opened no stream in time")
	ErrTooMany      = errors.New("tunnel: too many streams")
	ErrShutdown     = errors.New("tunnel: gateway is stopping")
	ErrNewerSession = errors.New("tunnel: a newer session of this host is connected")
)

// Defaults of Options.
const (
	DefaultPoolSize     = 8    // idle streams of a host: twice what an agent keeps by itself
	DefaultMaxWaiting   = 1024 // callers that wait for a stream of one host
	DefaultMaxPerUser   = 256  // open streams (threat T-31)
	DefaultOpenTimeout  = 10 * time.Second
	DefaultHelloTimeout = 5 * time.Second
	DefaultAdmitTimeout = 15 * time.Second
)

// Options are the settings and hooks of a Tunnel. A zero setting stands for
// its default; hooks may be nil.
type Options struct {
	Log *slog.Logger

	// Admit checks a host that has dialled in, over its own link, before it
	// counts as connected (DESIGN D9: the host signs a challenge). An error
	// ends the link.
	Admit func(ctx context.Context, host string, session int64, rt http.RoundTripper) error
	// DialBack asks the host, over its link, to dial n more streams. It may
	// return before they have arrived.
	DialBack func(ctx context.Context, host string, n int) error

	// OnUp tells of each new link of a host, OnDown that a host has none any
	// more. They come in order for a host, and must not wait for its links.
	OnUp   func(host string, session int64)
	OnDown func(host string, session int64, cause error)

	Turned       stream.TurnedOptions // pings of the links
	Relay        stream.RelayOptions  // of joined streams; the counters are ours
	PoolSize     int
	MaxWaiting   int
	MaxPerUser   int           // negative: no limit
	OpenTimeout  time.Duration // from asking for a stream to its arrival
	HelloTimeout time.Duration // for writing a hello
	AdmitTimeout time.Duration // for Admit
}

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	setInt(&o.PoolSize, DefaultPoolSize)
	setInt(&o.MaxWaiting, DefaultMaxWaiting)
	setInt(&o.MaxPerUser, DefaultMaxPerUser)
	setDuration(&o.OpenTimeout, DefaultOpenTimeout)
	setDuration(&o.HelloTimeout, DefaultHelloTimeout)
	setDuration(&o.AdmitTimeout, DefaultAdmitTimeout)
	return o
}

func setInt(p *int, def int) {
	if *p == 0 {
		*p = def
	}
}

func setDuration(p *time.Duration, def time.Duration) {
	if *p <= 0 {
		*p = def
	}
}

// Tunnel holds the links and pools of hosts and the streams of users. All
// methods may be called at the same time.
type Tunnel struct {
	o    Options
	ctx  context.Context // ends with Shutdown
	stop context.CancelCauseFunc

	mu     sync.Mutex
	closed bool
	hosts  map[string]*host
	live   liveSet

	running sync.WaitGroup // links and started relays; Add only under mu while not closed
}

// New returns a Tunnel without hosts.
func New(o Options) *Tunnel {
	t := &Tunnel{o: o.withDefaults(), hosts: map[string]*host{}, live: newLiveSet()}
	t.ctx, t.stop = context.WithCancelCause(context.Background())
	return t
}

// Shutdown refuses everything new, closes links, pools and streams, and waits
// for their ends or for ctx.
func (t *Tunnel) Shutdown(ctx context.Context) error {
	t.mu.Lock()
	t.closed = true
	var links []*link
	var idle []net.Conn
	for _, h := range t.hosts {
		if h.link != nil {
			links = append(links, h.link)
		}
		idle = append(idle, h.dropAll(ErrShutdown)...)
	}
	streams := t.live.match(func(Who) bool { return true })
	t.mu.Unlock()

	t.stop(ErrShutdown)
	closeAll(idle)
	for _, e := range streams {
		e.closer(ErrShutdown)
	}
	for _, l := range links {
		l.end(ErrShutdown)
	}
	ended := make(chan struct{})
	go func() {
		t.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// begin counts one more thing that Shutdown waits for; the caller calls
// running.Done. It fails once Shutdown has begun.
func (t *Tunnel) begin() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return ErrShutdown
	}
	t.running.Add(1)
	return nil
}

// Stats are figures for metrics.
type Stats struct {
	Hosts   int   // with a link
	Pooled  int   // idle streams of hosts
	Streams int   // open streams of users
	Opened  int64 // streams of users since the start
	Up      int64 // bytes from users to hosts since the start, open streams included
	Down    int64 // bytes from hosts to users likewise
}

// Stats returns the present figures.
func (t *Tunnel) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.live.stats()
	for _, h := range t.hosts {
		if h.link != nil {
			s.Hosts++
		}
		s.Pooled += len(h.pool)
	}
	return s
}
