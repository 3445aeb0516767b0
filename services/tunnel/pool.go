package tunnel

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/proto/stream"
)

// pooled is an idle stream that a host has dialled: two descriptors' worth of
// socket and nothing else, neither goroutine nor buffer.
type pooled struct {
	conn net.Conn
	dial int64 // host.dials when it came
}

// waiter is a caller of Open for whom no stream was idle. got receives one
// stream, or is closed after err is set.
type waiter struct {
	got chan net.Conn
	err error
}

// ServeStream takes a stream that a host has dialled and that the caller has
// authenticated as that host's. It keeps the stream for Open and returns at
// once, so that the server's memory for the request is freed. session is that
// of the host's agent; 0 where it is not known. It answers 503 while the host
// has no link, 409 to an older session, 429 where enough streams are idle.
func (t *Tunnel) ServeStream(w http.ResponseWriter, r *http.Request, hostID string, session int64) error {
	h, dead, code, err := t.reserve(hostID, session)
	closeAll(dead)
	if err != nil {
		http.Error(w, err.Error(), code)
		return err
	}
	conn, err := stream.Accept(w, r)
	if err != nil {
		t.settle(h, nil)
		return fmt.Errorf("stream of host %s: %w", hostID, err)
	}
	if !t.settle(h, conn) {
		_ = conn.Close()
		return fmt.Errorf("stream of host %s: %w", hostID, ErrHostAway)
	}
	return nil
}

// settle ends a reservation: conn, unless nil, goes into its place. It is false
// where the host has gone meanwhile.
func (t *Tunnel) settle(h *host, conn net.Conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	h.reserved--
	if conn == nil || t.closed || (h.link == nil && h.arriving == 0) {
		return false
	}
	h.offer(conn)
	return true
}

// reserve makes room for one more stream of the host, or says why not and with
// which HTTP status. dead are streams that have ended, for the caller to close.
func (t *Tunnel) reserve(hostID string, session int64) (h *host, dead []net.Conn, code int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h = t.hosts[hostID]
	switch {
	case t.closed:
		return nil, nil, http.StatusServiceUnavailable, ErrShutdown
	case h != nil && session > 0 && session < h.newest:
		return nil, nil, http.StatusConflict, ErrNewerSession
	case h == nil || (h.link == nil && h.arriving == 0):
		return nil, nil, http.StatusServiceUnavailable, fmt.Errorf("host %s: %w", hostID, ErrHostAway)
	}
	h.pool = slices.DeleteFunc(h.pool, func(p pooled) bool {
		if stream.Quiet(p.conn) { // one system call that does not block
			return false
		}
		dead = append(dead, p.conn)
		return true
	})
	if len(h.pool)+h.reserved >= t.o.PoolSize+len(h.waiters) {
		return nil, dead, http.StatusTooManyRequests, fmt.Errorf("host %s: %w are idle already", hostID, ErrTooMany)
	}
	h.reserved++
	return h, dead, 0, nil
}

// offer gives conn to who waits longest, else to the pool.
func (h *host) offer(conn net.Conn) { // t.mu is held
	if len(h.waiters) > 0 {
		w := h.waiters[0]
		h.waiters = slices.Delete(h.waiters, 0, 1)
		w.got <- conn // has room for the one it ever gets
		return
	}
	h.pool = append(h.pool, pooled{conn, h.dials})
}

// takeBefore takes the streams out of the pool that came before the given
// dial-in: they lead to an agent, or a life of it, that is gone.
func (h *host) takeBefore(dial int64) (stale []net.Conn) { // t.mu is held
	h.pool = slices.DeleteFunc(h.pool, func(p pooled) bool {
		if p.dial >= dial {
			return false
		}
		stale = append(stale, p.conn)
		return true
	})
	return stale
}

// dropAll sends the waiters home and returns the idle streams, for the caller
// to close.
func (h *host) dropAll(err error) (idle []net.Conn) { // t.mu is held
	for _, p := range h.pool {
		idle = append(idle, p.conn)
	}
	h.pool = nil
	for _, w := range h.waiters {
		w.err = err
		close(w.got)
	}
	h.waiters = nil
	return idle
}

// Open returns a stream to the host with hello written on it: an idle one, or
// one that the host is asked for. It fails with ErrHostAway, with ErrNoStream
// after OpenTimeout, with ErrTooMany where too many wait already, with
// stream.ErrBadHello where hello cannot be sent.
func (t *Tunnel) Open(ctx context.Context, hostID string, hello stream.Hello) (net.Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, t.o.OpenTimeout,
		fmt.Errorf("host %s: %w (%v)", hostID, ErrNoStream, t.o.OpenTimeout))
	defer cancel()
	if err := stream.WriteHello(discard{}, hello); err != nil {
		return nil, err
	}
	for {
		conn, err := t.take(ctx, hostID)
		if err != nil {
			return nil, err
		}
		if err = t.greet(conn, hello); err == nil {
			return conn, nil
		}
		_ = conn.Close()
		t.o.Log.Debug("idle stream was dead", "host", hostID, "err", err)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
}

func (t *Tunnel) greet(conn net.Conn, hello stream.Hello) error {
	if err := conn.SetWriteDeadline(time.Now().Add(t.o.HelloTimeout)); err != nil {
		return err
	}
	if err := stream.WriteHello(conn, hello); err != nil {
		return err
	}
	return conn.SetWriteDeadline(time.Time{})
}

// take returns the freshest idle stream that lives, or waits for one.
func (t *Tunnel) take(ctx context.Context, hostID string) (net.Conn, error) {
	for {
		conn, w, err := t.takeOrWait(hostID)
		if err != nil {
			return nil, err
		}
		if w != nil {
			return t.wait(ctx, hostID, w)
		}
		if stream.Quiet(conn) {
			return conn, nil
		}
		_ = conn.Close()
	}
}

func (t *Tunnel) takeOrWait(hostID string) (net.Conn, *waiter, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.hosts[hostID]
	switch {
	case t.closed:
		return nil, nil, ErrShutdown
	case h == nil || h.link == nil:
		return nil, nil, fmt.Errorf("host %s: %w", hostID, ErrHostAway)
	}
	if n := len(h.pool); n > 0 {
		conn := h.pool[n-1].conn
		h.pool[n-1] = pooled{}
		h.pool = h.pool[:n-1]
		return conn, nil, nil
	}
	if len(h.waiters) >= t.o.MaxWaiting {
		return nil, nil, fmt.Errorf("host %s: %w are waited for", hostID, ErrTooMany)
	}
	w := &waiter{got: make(chan net.Conn, 1)}
	h.waiters = append(h.waiters, w)
	return nil, w, nil
}

// wait asks the host for a stream and waits until one comes, from that or from
// the agent's own refill.
func (t *Tunnel) wait(ctx context.Context, hostID string, w *waiter) (net.Conn, error) {
	asking, cancel := context.WithCancel(ctx)
	var asker sync.WaitGroup
	defer asker.Wait()
	defer cancel()
	asked := make(chan error, 1)
	if t.o.DialBack != nil {
		asker.Go(func() { asked <- t.o.DialBack(asking, hostID, 1) })
	}
	for {
		select {
		case conn, ok := <-w.got:
			if !ok {
				return nil, fmt.Errorf("host %s: %w", hostID, w.err)
			}
			return conn, nil
		case err := <-asked:
			asked = nil
			if err != nil {
				t.giveUp(hostID, w)
				return nil, fmt.Errorf("ask host %s for a stream: %w", hostID, err)
			}
		case <-ctx.Done():
			t.giveUp(hostID, w)
			return nil, context.Cause(ctx)
		}
	}
}

// giveUp takes w out of the line; a stream that it was given goes to the next.
func (t *Tunnel) giveUp(hostID string, w *waiter) {
	if conn := t.leaveLine(hostID, w); conn != nil {
		_ = conn.Close()
	}
}

// leaveLine returns a stream that nobody has use for.
func (t *Tunnel) leaveLine(hostID string, w *waiter) net.Conn {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.hosts[hostID]
	if i := slices.Index(h.waiters, w); i >= 0 {
		h.waiters = slices.Delete(h.waiters, i, i+1)
		return nil
	}
	conn, ok := <-w.got // not in line: given or closed, so this does not wait
	if !ok {
		return nil
	}
	if t.closed || h.link == nil || (len(h.waiters) == 0 && len(h.pool) >= t.o.PoolSize) {
		return conn
	}
	h.offer(conn)
	return nil
}

// discard lets a hello be checked before a stream is spent on it.
type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
