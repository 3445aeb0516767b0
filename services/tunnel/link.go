package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"

	"github.com/carrel-dev/carrel/proto/stream"
)

// host is what is known of one host. Its entry outlives its link, so that the
// newest session is remembered. Fields are guarded by Tunnel.mu.
type host struct {
	id       string
	link     *link
	arriving int   // links between their 101 and their registration
	newest   int64 // session; no older one is let in
	dials    int64 // links so far: tells streams of an earlier link from later ones

	pool     []pooled
	reserved int // places in the pool for streams that are being accepted
	waiters  []*waiter

	// order is held around a change of link together with its callback, so
	// that callbacks come in the order of the changes.
	order sync.Mutex
}

// link is one connection that a host has dialled.
type link struct {
	turned  *stream.Turned
	session int64
	dial    int64

	mu    sync.Mutex
	cause error
}

// end closes the link; the first cause is kept.
func (l *link) end(cause error) {
	l.mu.Lock()
	if l.cause == nil {
		l.cause = cause
	}
	l.mu.Unlock()
	_ = l.turned.Close()
}

func (l *link) why() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil {
		return l.cause
	}
	return fmt.Errorf("%w: its link broke", ErrHostAway)
}

func (t *Tunnel) host(id string) *host { // t.mu is held
	h := t.hosts[id]
	if h == nil {
		h = &host{id: id}
		t.hosts[id] = h
	}
	return h
}

// ServeLink takes a host's dial-in, which the caller has authenticated as
// coming from that host in that session, and returns when the link has ended,
// with the reason. A host has one link: one of the same or a newer session
// takes the place of the present one; an older session is answered 409, so
// that its agent learns that it is not wanted any more.
func (t *Tunnel) ServeLink(w http.ResponseWriter, r *http.Request, hostID string, session int64) error {
	if err := t.begin(); err != nil {
		http.Error(w, "the gateway is stopping; try again", http.StatusServiceUnavailable)
		return err
	}
	defer t.running.Done()

	h, dial, err := t.arrive(hostID, session)
	if err != nil {
		http.Error(w, "a newer session of this host is connected", http.StatusConflict)
		return err
	}
	l, err := t.acceptLink(w, r, h, session)
	if err != nil {
		t.mu.Lock()
		h.arriving--
		t.mu.Unlock()
		return err
	}
	l.dial = dial
	if err := t.up(h, l); err != nil {
		l.end(err)
		return err
	}
	<-l.turned.Done()
	t.down(h, l)
	return l.why()
}

// arrive announces a link before its 101 goes out: streams of the agent may
// follow at once.
func (t *Tunnel) arrive(id string, session int64) (*host, int64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.host(id)
	if session < h.newest {
		return nil, 0, fmt.Errorf("%w: %d, this is %d", ErrNewerSession, h.newest, session)
	}
	h.arriving++
	h.dials++
	return h, h.dials, nil
}

func (t *Tunnel) acceptLink(w http.ResponseWriter, r *http.Request, h *host, session int64) (*link, error) {
	conn, err := stream.Accept(w, r)
	if err != nil {
		return nil, fmt.Errorf("link of host %s: %w", h.id, err)
	}
	turned, err := stream.NewTurnedTransport(conn, t.o.Turned)
	if err != nil {
		return nil, fmt.Errorf("link of host %s: %w", h.id, err)
	}
	if t.o.Admit != nil {
		ctx, cancel := context.WithTimeout(t.ctx, t.o.AdmitTimeout) // the request's own ended with its takeover
		defer cancel()
		if err := t.o.Admit(ctx, h.id, session, turned); err != nil {
			_ = turned.Close()
			return nil, fmt.Errorf("link of host %s is not admitted: %w", h.id, err)
		}
	}
	return &link{turned: turned, session: session}, nil
}

// up makes l the link of h.
func (t *Tunnel) up(h *host, l *link) error {
	h.order.Lock()
	defer h.order.Unlock()
	t.mu.Lock()
	h.arriving--
	var err error
	switch {
	case t.closed:
		err = ErrShutdown
	case l.session < h.newest, h.link != nil && l.dial < h.link.dial:
		err = ErrNewerSession // one came in while this one was proving itself
	}
	if err != nil {
		t.mu.Unlock()
		return err
	}
	old := h.link
	h.link, h.newest = l, l.session
	stale := h.takeBefore(l.dial)
	t.mu.Unlock()

	if old != nil {
		t.o.Log.Info("host link replaced", "host", h.id, "old", old.session, "new", l.session)
		old.end(ErrNewerSession)
	}
	closeAll(stale)
	t.o.Log.Info("host link up", "host", h.id, "session", l.session)
	if t.o.OnUp != nil {
		t.o.OnUp(h.id, l.session)
	}
	return nil
}

// down forgets l where it has not been replaced.
func (t *Tunnel) down(h *host, l *link) {
	h.order.Lock()
	defer h.order.Unlock()
	t.mu.Lock()
	if h.link != l {
		t.mu.Unlock()
		return
	}
	h.link = nil
	idle := h.dropAll(ErrHostAway)
	t.mu.Unlock()
	closeAll(idle)
	cause := l.why()
	t.o.Log.Info("host link down", "host", h.id, "session", l.session, "cause", cause)
	if t.o.OnDown != nil {
		t.o.OnDown(h.id, l.session, cause)
	}
}

// Client returns a client whose calls go to the host, whatever host their
// address names (http://host/...). It follows the host from link to link; a
// call without a link fails with ErrHostAway, as does Client itself.
func (t *Tunnel) Client(hostID string) (*http.Client, error) {
	if _, err := t.linkOf(hostID); err != nil {
		return nil, err
	}
	return &http.Client{Transport: caller{t, hostID}}, nil
}

// caller is the RoundTripper of one host.
type caller struct {
	t    *Tunnel
	host string
}

func (c caller) RoundTrip(r *http.Request) (*http.Response, error) {
	l, err := c.t.linkOf(c.host)
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, err
	}
	resp, err := l.turned.RoundTrip(r)
	if err == nil {
		return resp, nil
	}
	select {
	case <-l.turned.Done():
		return nil, errors.Join(ErrHostAway, err)
	default:
		return nil, err
	}
}

func (t *Tunnel) linkOf(hostID string) (*link, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.hosts[hostID]
	if h == nil || h.link == nil {
		return nil, fmt.Errorf("host %s: %w", hostID, ErrHostAway)
	}
	return h.link, nil
}

// CloseHost ends the host's link, its idle streams and the users' streams to
// it, and returns how many of those there were. The host may dial in again
// unless the caller refuses it.
func (t *Tunnel) CloseHost(hostID string, reason error) int {
	t.mu.Lock()
	h := t.hosts[hostID]
	var l *link
	var idle []net.Conn
	if h != nil {
		l = h.link
		idle = h.dropAll(reason)
	}
	t.mu.Unlock()
	closeAll(idle)
	if l != nil {
		l.end(reason)
	}
	return t.closeMatching(reason, func(w Who) bool { return w.Host == hostID })
}

func closeAll(conns []net.Conn) {
	for _, c := range conns {
		_ = c.Close()
	}
}
