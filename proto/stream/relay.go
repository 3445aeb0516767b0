package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// DefaultWriteStall is the time after which a peer that takes nothing of
	// what waits for it is given up (threat T-31).
	DefaultWriteStall = 30 * time.Second
	// DefaultLinger is the time that one way may go on after the other one
	// could not be written any more, to deliver what was already sent.
	DefaultLinger = 5 * time.Second
	// DefaultSpliceAfter is the number of bytes without a pause after which a
	// way counts as bulk.
	DefaultSpliceAfter = 1 << 20

	pause     = 50 * time.Millisecond // a silence this long ends bulk mode
	bigBuffer = 64 << 10
	// smallBuffer is what a way holds while idle if its source tells nothing
	// about readiness (TLS): an SSH keystroke's packet fits, with room.
	smallBuffer = 512
)

// ErrStalled ends a relay of which one side took no byte for the time set, as
// far as its kernel tells ours: a receiver reports room once a sixteenth of its
// buffer is free.
var ErrStalled = errors.New("stream: peer reads nothing")

// RelayOptions are the settings of one Relay; the zero value is good.
type RelayOptions struct {
	WriteStall  time.Duration // 0: DefaultWriteStall
	Linger      time.Duration // 0: DefaultLinger
	SpliceAfter int64         // bytes; 0: DefaultSpliceAfter; negative: never

	// AToB and BToA, where set, count the bytes delivered while they flow.
	AToB, BToA *atomic.Int64
}

// Stats are the bytes that a relay delivered, by direction.
type Stats struct {
	AToB, BToA int64
}

// Relay carries bytes between a and b until both ways have ended, one side
// fails, or ctx ends; it closes both before it returns. The end of one way is
// passed on as a half-close (TCP, unix sockets, TLS); a side that knows no
// half-close is closed, with which the relay ends.
//
// While nothing flows it holds no buffer (512 bytes for a source without a
// file descriptor of its own, such as *tls.Conn), and on Linux bulk between
// plain sockets is moved by splice(2). A side that fails makes the other one
// fail too rather than look like an orderly end (crypto/tls does not tell a
// connection that is cut between two records from one that ends). Relay owns the deadlines of
// both connections. The error is nil after two orderly ends, ErrStalled after
// WriteStall, else the cause of ctx or the first failure.
func Relay(ctx context.Context, a, b net.Conn, o RelayOptions) (Stats, error) {
	if o.WriteStall <= 0 {
		o.WriteStall = DefaultWriteStall
	}
	if o.Linger <= 0 {
		o.Linger = DefaultLinger
	}
	if o.SpliceAfter == 0 {
		o.SpliceAfter = DefaultSpliceAfter
	}
	r := &relay{a: a, b: b, linger: o.Linger}
	ab, ba := newWay(a, b, o, o.AToB), newWay(b, a, o, o.BToA)
	stop := context.AfterFunc(ctx, func() { r.fail(context.Cause(ctx)) })
	defer stop()

	other := make(chan struct{})
	go func() {
		defer close(other)
		r.ended(ab, ab.run())
	}()
	r.ended(ba, ba.run())
	<-other
	return Stats{AToB: ab.moved.Load(), BToA: ba.moved.Load()}, r.finish()
}

// relay is what the two ways share: how it ends.
type relay struct {
	a, b   net.Conn
	linger time.Duration

	mu     sync.Mutex
	err    error // the first failure
	closed bool
	timer  *time.Timer // runs out at the end of the linger time
}

// ended takes the result of one way.
func (r *relay) ended(w *way, err error) {
	if err == nil {
		c, ok := w.dst.(closeWriter)
		if !ok {
			r.fail(nil)
			return
		}
		err = halfClose(c)
	}
	var we *writeError
	switch {
	case err == nil:
	case errors.Is(err, ErrStalled), !errors.As(err, &we):
		r.fail(err)
	default:
		r.drain(err)
	}
}

// drain lets the other way go on for the linger time: the side that could not
// be written may have sent its last words before it went.
func (r *relay) drain(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil {
		r.err = err
	}
	if r.timer == nil && !r.closed {
		r.timer = time.AfterFunc(r.linger, func() { r.fail(err) })
	}
}

// fail cuts both sides; their ways end at once. Without an error it is an
// orderly end that cannot be told in another way.
func (r *relay) fail(err error) {
	r.mu.Lock()
	first := !r.closed
	r.closed = true
	if first && r.err == nil {
		r.err = err
	}
	r.mu.Unlock()
	switch {
	case !first:
	case err == nil:
		_ = r.a.Close()
		_ = r.b.Close()
	default:
		abort(r.a)
		abort(r.b)
	}
}

// finish closes what is still open and returns how the relay ended.
func (r *relay) finish() error {
	r.mu.Lock()
	if r.timer != nil {
		r.timer.Stop()
	}
	open := !r.closed
	r.closed = true
	err := r.err
	r.mu.Unlock()
	if open {
		_ = r.a.Close() // both have been told the end already
		_ = r.b.Close()
	}
	return err
}

// writeError marks a failure of the side that was written.
type writeError struct{ err error }

func (e *writeError) Error() string { return "relay write: " + e.err.Error() }
func (e *writeError) Unwrap() error { return e.err }

// way is one direction of a relay.
type way struct {
	src, dst    net.Conn // without prefix
	prefix      []byte
	moved       *atomic.Int64
	total       *atomic.Int64 // the caller's live counter, or nil
	stall       stallWatch
	spliceAfter int64
	raw         rawWay // where the system lets us wait without a buffer
}

func newWay(src, dst net.Conn, o RelayOptions, total *atomic.Int64) *way {
	w := &way{moved: new(atomic.Int64), total: total, spliceAfter: o.SpliceAfter}
	for {
		p, ok := src.(*prefixConn)
		if !ok {
			break
		}
		w.prefix = append(p.prefix, w.prefix...)
		src = p.Conn
	}
	for {
		p, ok := dst.(*prefixConn)
		if !ok {
			break
		}
		dst = p.Conn
	}
	w.src, w.dst = src, dst
	w.stall = stallWatch{conn: dst, limit: o.WriteStall}
	w.raw.init(src, dst)
	return w
}

// run moves bytes until the source ends (nil) or something fails.
func (w *way) run() error {
	if len(w.prefix) > 0 {
		if err := w.write(w.prefix); err != nil {
			return err
		}
		w.prefix = nil
	}
	if w.raw.usable() {
		return w.runRaw()
	}
	return w.runBuffered()
}

// runBuffered is for a source that can only be read: it waits with a small
// buffer, and takes a big one as long as more follows.
func (w *way) runBuffered() error {
	small := make([]byte, smallBuffer)
	for {
		n, err := w.src.Read(small)
		if n > 0 {
			if werr := w.write(small[:n]); werr != nil {
				return werr
			}
		}
		if err == nil && n == len(small) {
			err = w.bulk()
		}
		if err != nil {
			return readEnd(err)
		}
	}
}

// bulk reads with a big buffer until the source pauses. A read that times out
// leaves the state of a TLS connection whole, so it can go on afterwards.
func (w *way) bulk() error {
	buf := buffers.Get().(*[bigBuffer]byte)
	defer buffers.Put(buf)
	for {
		if err := w.src.SetReadDeadline(time.Now().Add(pause)); err != nil {
			return err
		}
		n, err := w.src.Read(buf[:])
		if n > 0 {
			if werr := w.write(buf[:n]); werr != nil {
				return werr
			}
		}
		if isTimeout(err) {
			return w.src.SetReadDeadline(time.Time{})
		}
		if err != nil {
			return err
		}
	}
}

// write delivers p whole or fails with a *writeError.
func (w *way) write(p []byte) error {
	if w.raw.writable() {
		return w.writeRaw(p)
	}
	w.stall.arm()
	n, err := w.dst.Write(p)
	w.stall.disarm()
	w.count(int64(n))
	return w.writeFailure(err)
}

func (w *way) writeFailure(err error) error {
	if err == nil {
		return nil
	}
	if w.stall.struck() {
		err = fmt.Errorf("%w for %v", ErrStalled, w.stall.limit)
	}
	return &writeError{err}
}

func (w *way) count(n int64) {
	w.moved.Add(n)
	if w.total != nil {
		w.total.Add(n)
	}
}

// halfClose passes the end of the source on.
func halfClose(c closeWriter) error {
	if err := c.CloseWrite(); err != nil {
		return &writeError{err}
	}
	return nil
}

func readEnd(err error) error {
	if err == io.EOF { //nolint:errorlint // only the bare one: a wrapped EOF is a broken stream
		return nil
	}
	var we *writeError
	if errors.As(err, &we) {
		return err
	}
	return fmt.Errorf("relay read: %w", err)
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// buffers lends the big buffers; none is out while nothing flows.
var buffers = sync.Pool{New: func() any { return new([bigBuffer]byte) }}
