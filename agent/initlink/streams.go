package initlink

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"net"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
	"github.com/carrel-dev/carrel/proto/stream"
)

// maxAsked is how many dial-backs of a run may be under way at a time.
const maxAsked = 64

// streams are a run's connections that carry no stream yet. The run's lock guards them.
type streams struct {
	idle  []*net.UnixConn
	asked map[string]*ask
}

// ask is one dial-back under way. A taker gets the connection; without one it goes to the idle ones.
type ask struct {
	taker chan *net.UnixConn
	until time.Time // when nobody waits for it any more
}

// expire forgets dial-backs that did not come.
func (s *streams) expire(now time.Time) {
	maps.DeleteFunc(s.asked, func(_ string, a *ask) bool { return now.After(a.until) })
}

func (s *streams) takeAll() []*net.UnixConn {
	idle := s.idle
	s.idle = nil
	maps.DeleteFunc(s.asked, func(_ string, a *ask) bool { return a.taker == nil }) // those that were to become idle
	return idle
}

func closeAll(conns []*net.UnixConn) {
	for _, c := range conns {
		c.Close()
	}
}

// deliver puts a dialled-back connection where it was asked for.
func (r *run) deliver(nonce string, conn *net.UnixConn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	a, ok := r.streams.asked[nonce]
	if !ok || r.closed {
		return false
	}
	delete(r.streams.asked, nonce)
	if a.taker != nil {
		a.taker <- conn // has room for one
		return true
	}
	if r.control == nil {
		return false
	}
	r.streams.idle = append(r.streams.idle, conn)
	return true
}

// openStream sends h on a connection that lies ready, or on one that is asked for now.
func (r *run) openStream(ctx context.Context, h stream.Hello) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, r.opts.StreamWait)
	defer cancel()
	defer r.refill() //nolint:contextcheck // goes on in the background for as long as the run does
	for {
		conn := r.takeIdle()
		if conn == nil {
			break
		}
		if sendHello(ctx, conn, h) == nil {
			return conn, nil
		}
		conn.Close() // serve ended since it dialled
	}
	conn, err := r.dialled(ctx)
	if err != nil {
		return nil, fmt.Errorf("open stream to run %s/%d: %w", r.key.Workspace, r.key.Epoch, err)
	}
	if err := sendHello(ctx, conn, h); err != nil {
		conn.Close()
		return nil, fmt.Errorf("open stream to run %s/%d: %w", r.key.Workspace, r.key.Epoch, err)
	}
	return conn, nil
}

func sendHello(ctx context.Context, conn *net.UnixConn, h stream.Hello) error {
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetWriteDeadline(deadline); err != nil {
			return err
		}
	}
	if err := stream.WriteHello(conn, h); err != nil {
		return err
	}
	return conn.SetWriteDeadline(time.Time{})
}

func (r *run) takeIdle() *net.UnixConn {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(r.streams.idle)
	if n == 0 {
		return nil
	}
	conn := r.streams.idle[n-1]
	r.streams.idle = r.streams.idle[:n-1]
	return conn
}

// dialled asks for a connection and waits for it. While serve is just restarting, it waits for the next control connection.
func (r *run) dialled(ctx context.Context) (*net.UnixConn, error) {
	if err := r.await(ctx, func() bool {
		return r.control != nil && r.control.client != nil && r.applied == r.version && r.version != 0
	}); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotConnected, err)
	}
	taker := make(chan *net.UnixConn, 1)
	nonce, err := r.askFor(ctx, taker)
	if err != nil {
		return nil, err
	}
	select {
	case conn := <-taker:
		return conn, nil
	case <-ctx.Done():
	case <-r.ctx.Done():
	}
	r.mu.Lock()
	delete(r.streams.asked, nonce)
	r.mu.Unlock()
	select {
	case conn := <-taker: // it came just now
		conn.Close()
	default:
	}
	if r.ctx.Err() != nil {
		return nil, ErrClosed
	}
	return nil, fmt.Errorf("carrel-init did not dial back: %w", context.Cause(ctx))
}

// askFor has carrel-init dial back once.
func (r *run) askFor(ctx context.Context, taker chan *net.UnixConn) (string, error) {
	client, err := r.client()
	if err != nil {
		return "", err
	}
	nonce, now := rand.Text(), time.Now()
	r.mu.Lock()
	r.streams.expire(now)
	if len(r.streams.asked) >= maxAsked {
		r.mu.Unlock()
		return "", fmt.Errorf("%d streams are being opened already", maxAsked)
	}
	r.streams.asked[nonce] = &ask{taker: taker, until: now.Add(r.opts.StreamWait)}
	r.mu.Unlock()
	req := connect.NewRequest(&agentv1.WorkspaceServiceDialBackRequest{Nonce: nonce, Count: 1})
	if _, err := client.DialBack(ctx, req); err != nil {
		r.mu.Lock()
		delete(r.streams.asked, nonce)
		r.mu.Unlock()
		return "", fmt.Errorf("ask for a connection: %w", err)
	}
	return nonce, nil
}

// refill brings the ready connections back to their number, in the background.
func (r *run) refill() {
	r.mu.Lock()
	busy := r.refilling || r.control == nil
	if !busy {
		r.refilling = true
	}
	r.mu.Unlock()
	if busy {
		return
	}
	started := r.start(func() {
		ctx, cancel := context.WithTimeout(r.ctx, r.opts.CallTimeout)
		defer cancel()
		for {
			r.mu.Lock()
			r.streams.expire(time.Now())
			missing := r.opts.Pool - len(r.streams.idle)
			for _, a := range r.streams.asked {
				if a.taker == nil {
					missing--
				}
			}
			if missing <= 0 {
				r.refilling = false
			}
			r.mu.Unlock()
			if missing <= 0 {
				return
			}
			if _, err := r.askFor(ctx, nil); err != nil {
				r.log.Debug("refill", "err", err)
				r.mu.Lock()
				r.refilling = false
				r.mu.Unlock()
				return
			}
		}
	})
	if !started {
		r.mu.Lock()
		r.refilling = false
		r.mu.Unlock()
	}
}
