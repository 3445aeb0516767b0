package initlink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/carrel-dev/carrel/agent/initlink/preamble"
	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/agent/v1/agentv1connect"
	"github.com/carrel-dev/carrel/proto/stream"
)

// retryPause is the wait before a call that failed for a passing reason is made again.
const retryPause = 200 * time.Millisecond

// run is one run's link.
type run struct {
	key      Key
	opts     Options
	log      *slog.Logger
	listener *net.UnixListener
	ctx      context.Context
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	ready    chan struct{}
	pending  chan struct{} // a slot per unsorted connection

	mu        sync.Mutex
	closed    bool
	engine    int
	control   *control
	cfg       *Config
	version   int64 // of cfg
	applied   int64 // newest version in force
	refused   int64 // newest version refused, with refusal
	refusal   string
	found     Found
	moved     chan struct{} // closed and renewed at every change of the above
	streams   streams
	refilling bool
}

// control is one control connection. turned and client are nil until it speaks; the run's lock guards them.
type control struct {
	conn   *net.UnixConn
	turned *stream.Turned
	client agentv1connect.WorkspaceServiceClient
	pid    int
}

func newRun(ctx context.Context, key Key, opts Options, l *net.UnixListener) *run {
	ctx, cancel := context.WithCancel(ctx)
	return &run{
		key: key, opts: opts, listener: l, ctx: ctx, cancel: cancel,
		log:   opts.Log.With("workspace", key.Workspace, "epoch", key.Epoch),
		ready: make(chan struct{}), moved: make(chan struct{}), pending: make(chan struct{}, opts.Pending),
		streams: streams{asked: make(map[string]*ask)},
	}
}

// start runs fn as part of the run, unless it is closed.
func (r *run) start(fn func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.wg.Go(fn)
	return true
}

func (r *run) close() {
	r.mu.Lock()
	r.closed = true
	c := r.control
	idle := r.streams.takeAll()
	r.mu.Unlock()
	r.cancel()
	r.listener.Close()
	if c != nil {
		c.conn.Close()
	}
	closeAll(idle)
	r.wg.Wait()
}

// change makes fn's changes and wakes all who wait for one.
func (r *run) change(fn func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fn()
	close(r.moved)
	r.moved = make(chan struct{})
}

// await waits until ok, which is called with the lock held.
func (r *run) await(ctx context.Context, ok func() bool) error {
	for {
		r.mu.Lock()
		done, moved := ok(), r.moved
		r.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-r.ctx.Done():
			return ErrClosed
		}
	}
}

func (r *run) attach(engine int) {
	var old *control
	r.change(func() {
		if r.engine != 0 && r.engine != engine {
			old, r.control = r.control, nil
		}
		r.engine = engine
	})
	if old != nil {
		old.conn.Close()
	}
}

func (r *run) accept() {
	for {
		conn, err := r.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			r.log.Warn("accept", "err", err)
			select {
			case <-r.ctx.Done():
				return
			case <-time.After(retryPause):
			}
			continue
		}
		select {
		case r.pending <- struct{}{}:
		default:
			conn.Close()
			continue
		}
		if !r.start(func() { r.sort(conn) }) {
			conn.Close()
			return
		}
	}
}

// sort checks a new connection's peer, reads what it is for, and puts it there.
func (r *run) sort(conn *net.UnixConn) {
	p, pid, err := r.greet(conn)
	<-r.pending
	if err != nil {
		r.log.Warn("connection refused", "err", err)
		conn.Close()
		return
	}
	if p.Kind == preamble.Stream {
		if !r.deliver(p.Nonce, conn) {
			r.log.Warn("stream refused: nobody asked for it")
			conn.Close()
		}
		return
	}
	r.serveControl(conn, pid)
}

func (r *run) greet(conn *net.UnixConn) (preamble.Preamble, int, error) {
	ctx, cancel := context.WithTimeout(r.ctx, r.opts.AttachWait)
	defer cancel()
	engine := 0
	err := r.await(ctx, func() bool { engine = r.engine; return engine != 0 })
	if err != nil {
		return preamble.Preamble{}, 0, fmt.Errorf("container not known yet: %w", err)
	}
	pid, err := checkPeer(conn, engine)
	if err != nil {
		return preamble.Preamble{}, 0, err
	}
	stop := context.AfterFunc(r.ctx, func() { conn.Close() })
	defer stop()
	if err := conn.SetReadDeadline(time.Now().Add(r.opts.GreetTimeout)); err != nil {
		return preamble.Preamble{}, 0, err
	}
	p, err := preamble.Read(conn)
	if err != nil {
		return preamble.Preamble{}, 0, err
	}
	return p, pid, conn.SetReadDeadline(time.Time{})
}

// serveControl makes conn the control connection and keeps the configuration in force over it until it ends. A second one is
// refused while the first one's process lives.
func (r *run) serveControl(conn *net.UnixConn, pid int) {
	c := &control{pid: pid, conn: conn}
	if !r.takeControl(c) { // before a word is said to it
		r.log.Warn("second control connection refused", "pid", pid)
		conn.Close()
		return
	}
	defer r.dropControl(c)
	turned, err := stream.NewTurnedTransport(conn, stream.TurnedOptions{})
	if err != nil {
		conn.Close()
		return
	}
	defer turned.Close()
	client := agentv1connect.NewWorkspaceServiceClient(&http.Client{Transport: turned}, "http://carrel-init",
		connect.WithAcceptCompression("gzip", nil, nil))
	r.change(func() { c.turned, c.client = turned, client })
	r.log.Info("carrel-init connected", "pid", pid)
	r.keepConfigured(c)
	r.log.Info("carrel-init disconnected", "pid", pid)
}

func (r *run) takeControl(c *control) bool {
	var old *control
	ok := false
	r.change(func() {
		old = r.control
		ok = !r.closed && (old == nil || old.pid == c.pid || processGone(old.pid))
		if ok {
			r.control = c
		}
	})
	if ok && old != nil {
		old.conn.Close()
	}
	return ok
}

func (r *run) dropControl(c *control) {
	var idle []*net.UnixConn
	r.change(func() {
		if r.control == c {
			r.control = nil
			idle = r.streams.takeAll()
		}
	})
	closeAll(idle)
}

// keepConfigured sends the newest configuration, and each later one, until the connection ends.
func (r *run) keepConfigured(c *control) {
	sent := int64(-1)
	for {
		r.mu.Lock()
		cfg, version, moved := r.cfg, r.version, r.moved
		r.mu.Unlock()
		var retry <-chan time.Time
		if cfg != nil && sent < version {
			if r.apply(c, *cfg, version) {
				sent = version
			} else {
				retry = time.After(retryPause)
			}
		}
		select {
		case <-moved:
		case <-retry:
		case <-c.turned.Done():
			return
		case <-r.ctx.Done():
			return
		}
	}
}

// apply makes one Configure call. It tells whether the answer is final: in force, or refused.
func (r *run) apply(c *control, cfg Config, version int64) bool {
	ctx, cancel := context.WithTimeout(r.ctx, r.opts.CallTimeout)
	defer cancel()
	resp, err := c.client.Configure(ctx, connect.NewRequest(cfg.request(version)))
	var refused *connect.Error
	switch {
	case err == nil:
		r.change(func() {
			r.found = Found{InitVersion: resp.Msg.GetInitVersion(), Sudo: resp.Msg.GetSudo(), Shell: resp.Msg.GetShell()}
			if r.applied == 0 {
				close(r.ready)
			}
			r.applied = max(r.applied, version)
		})
		r.refill()
		return true
	case errors.As(err, &refused) && final(refused.Code()):
		r.log.Warn("configuration refused", "err", err)
		r.change(func() { r.refused, r.refusal = version, refused.Message() })
		return true
	default:
		r.log.Warn("configure", "err", err)
		return false
	}
}

func final(code connect.Code) bool {
	return code == connect.CodeInvalidArgument || code == connect.CodeFailedPrecondition || code == connect.CodeUnimplemented
}

func (r *run) configure(ctx context.Context, cfg Config) (Found, error) {
	var version int64
	r.change(func() {
		r.version = max(r.version+1, r.opts.Now().UnixNano())
		r.cfg, version = &cfg, r.version
	})
	var found Found
	refusal := ""
	err := r.await(ctx, func() bool {
		if r.refused >= version {
			refusal = r.refusal
			return true
		}
		found = r.found
		return r.applied >= version
	})
	if err != nil {
		return Found{}, fmt.Errorf("configure run %s/%d: %w", r.key.Workspace, r.key.Epoch, err)
	}
	if refusal != "" {
		return Found{}, &RefusedError{Message: refusal}
	}
	return found, nil
}

func (r *run) configuration() (Config, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cfg == nil {
		return Config{}, false
	}
	return *r.cfg, true
}

func (r *run) status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Status{Connected: r.control != nil && r.control.client != nil, Found: r.found}
	s.Ready = s.Connected && r.cfg != nil && r.applied == r.version
	if r.refused == r.version && r.version != 0 {
		s.Refused = r.refusal
	}
	return s
}

func (r *run) client() (agentv1connect.WorkspaceServiceClient, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.control == nil || r.control.client == nil {
		return nil, fmt.Errorf("run %s/%d: %w", r.key.Workspace, r.key.Epoch, ErrNotConnected)
	}
	return r.control.client, nil
}

func (r *run) stop(ctx context.Context, reason string, grace time.Duration) error {
	r.mu.Lock()
	c := r.control
	r.mu.Unlock()
	client, err := r.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, r.opts.CallTimeout)
	defer cancel()
	req := &agentv1.StopRequest{Reason: reason}
	if grace > 0 {
		req.Grace = durationpb.New(grace)
	}
	if _, err := client.Stop(ctx, connect.NewRequest(req)); err != nil {
		// A stop ends the connection, at times before its answer has come through.
		if connect.CodeOf(err) == connect.CodeUnavailable && r.await(ctx, func() bool { return r.control != c }) == nil {
			return nil
		}
		return fmt.Errorf("stop run %s/%d: %w", r.key.Workspace, r.key.Epoch, err)
	}
	return nil
}

func (r *run) activity(ctx context.Context) (Activity, error) {
	client, err := r.client()
	if err != nil {
		return Activity{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, r.opts.CallTimeout)
	defer cancel()
	resp, err := client.Activity(ctx, connect.NewRequest(&agentv1.ActivityRequest{}))
	if err != nil {
		return Activity{}, fmt.Errorf("activity of run %s/%d: %w", r.key.Workspace, r.key.Epoch, err)
	}
	a := Activity{SSHSessions: int(resp.Msg.GetSshSessions()), TypedAgo: -1}
	if d := resp.Msg.GetTypedAgo(); d != nil {
		a.TypedAgo = d.AsDuration()
	}
	return a, nil
}
