package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/proto/stream"
)

// pool is the streams of one link that wait for their hello, each in a
// goroutine of its own. It ends with the link; streams in use do not.
type pool struct {
	l      *Link
	run    context.Context // of Link.Run: that of streams in use
	ctx    context.Context // of the link: that of idle streams
	cancel context.CancelCauseFunc

	mu     sync.Mutex
	closed bool
	idle   int // being dialled, or waiting for a hello
	waits  int // of idle: dialled

	wg sync.WaitGroup // Add only under mu while not closed
}

func newPool(run context.Context, l *Link) *pool {
	p := &pool{l: l, run: run}
	p.ctx, p.cancel = context.WithCancelCause(run)
	return p
}

// fill starts streams until as many are idle as should be kept ready.
func (p *pool) fill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.idle < p.l.o.Streams && p.start() {
	}
}

// more starts n streams beyond those that are idle.
func (p *pool) more(n int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n < 1 {
		return fmt.Errorf("link: cannot dial %d streams", n)
	}
	if p.idle+n > p.l.o.Streams+p.l.o.MaxExtra {
		return fmt.Errorf("%w: %d", ErrBusy, p.idle)
	}
	for range n {
		if !p.start() {
			return errors.New("link: not connected")
		}
	}
	return nil
}

// start runs one more stream; false once the pool is closed.
func (p *pool) start() bool { // p.mu is held
	if p.closed || p.ctx.Err() != nil {
		return false
	}
	p.idle++
	p.wg.Go(p.keep)
	return true
}

// wait returns when no stream waits any more, the link's context having ended.
func (p *pool) wait() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *pool) ready() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.waits
}

// keep brings one stream to its hello, however often it must be dialled, and
// has it replaced then.
func (p *pool) keep() {
	var b backoff
	for {
		waited, err := p.attempt()
		if errors.Is(err, ErrNewerSession) {
			p.cancel(err) // the link's own dial decides about ErrRefused
		}
		if err == nil || !p.again() {
			break
		}
		if waited >= p.l.o.MaxBackoff {
			b.reset()
		}
		wait := b.next(p.l.o.MinBackoff, p.l.o.MaxBackoff)
		p.l.o.Log.Debug("idle stream failed", "err", err, "retry", wait)
		if !sleep(p.ctx, wait) {
			break
		}
	}
	p.leave()
	p.fill()
}

// again reports whether a stream that failed is still needed.
func (p *pool) again() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ctx.Err() == nil && p.idle <= p.l.o.Streams
}

func (p *pool) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle--
}

// attempt dials once, waits for a hello and hands the stream over. It returns
// how long the stream lived where none came.
func (p *pool) attempt() (time.Duration, error) {
	conn, _, err := p.l.dial(p.ctx, StreamPath)
	if err != nil {
		return 0, err
	}
	p.waiting(1)
	start := time.Now()
	hello, err := p.hello(conn)
	p.waiting(-1)
	if err != nil {
		_ = conn.Close()
		return time.Since(start), err
	}
	p.l.serve(p.run, hello, conn)
	return 0, nil
}

func (p *pool) waiting(by int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waits += by
}

// hello waits for a hello as long as the link lives, but not for half of one.
func (p *pool) hello(conn net.Conn) (stream.Hello, error) {
	stop := context.AfterFunc(p.ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var first [1]byte
	if _, err := io.ReadFull(conn, first[:]); err != nil {
		return stream.Hello{}, fmt.Errorf("wait for hello: %w", err)
	}
	if !stop() {
		return stream.Hello{}, context.Cause(p.ctx)
	}
	if err := conn.SetReadDeadline(time.Now().Add(p.l.o.HelloTimeout)); err != nil {
		return stream.Hello{}, err
	}
	hello, err := stream.ReadHello(io.MultiReader(strings.NewReader(string(first[:])), conn))
	if err != nil {
		return stream.Hello{}, err
	}
	return hello, conn.SetReadDeadline(time.Time{})
}

// serve hands a stream to OnStream in a goroutine that Run waits for. Its
// panic ends that stream alone.
func (l *Link) serve(ctx context.Context, hello stream.Hello, conn net.Conn) {
	l.active(1)
	l.streams.Go(func() {
		defer l.active(-1)
		defer func() { _ = conn.Close() }()
		defer func() {
			if v := recover(); v != nil {
				l.o.Log.Error("stream panicked", "kind", hello.Kind, "workspace", hello.Workspace,
					"panic", v, "stack", string(debug.Stack()))
			}
		}()
		l.o.OnStream(ctx, hello, conn)
	})
}
