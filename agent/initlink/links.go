// Package initlink is the agent's side of the link to carrel-init: one socket, one control connection and many streams per run.
package initlink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/carrel-dev/carrel/proto/stream"
)

// SocketName is the socket's name in a run's directory.
const SocketName = "link.sock"

// Errors that callers tell apart.
var (
	ErrUnknownRun   = errors.New("no such run: Prepare comes first")
	ErrNotConnected = errors.New("carrel-init is not connected")
	ErrClosed       = errors.New("the link is closed")
)

// RefusedError is carrel-init's word that a configuration cannot be; it stays so until something is changed.
type RefusedError struct{ Message string }

func (e *RefusedError) Error() string { return e.Message }

// Key names a run.
type Key struct {
	Workspace string
	Epoch     int64
}

// Options of Links. The zero value of a duration or count means its default.
type Options struct {
	// Dir holds one directory per run. It must be on a local file system, owned by root; it is made with mode 0700.
	Dir string
	Log *slog.Logger
	// Now gives configuration versions, which must grow over agent restarts. Default time.Now.
	Now func() time.Time
	// Pool is how many connections lie ready per run, so that a stream begins without a round trip. Default 1.
	Pool int
	// Pending is how many connections of a run may be unsorted at a time; more are closed. Default 16.
	Pending int
	// AttachWait is how long a connection may wait for Attach. Default 30 s.
	AttachWait time.Duration
	// GreetTimeout is how long a peer has for its first line. Default 5 s.
	GreetTimeout time.Duration
	// CallTimeout bounds one call to carrel-init. Default 20 s: the first Configure copies a skeleton home.
	CallTimeout time.Duration
	// StreamWait bounds OpenStream. Default 10 s.
	StreamWait time.Duration
}

func (o Options) withDefaults() Options {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	set(&o.AttachWait, 30*time.Second)
	set(&o.GreetTimeout, 5*time.Second)
	set(&o.CallTimeout, 20*time.Second)
	set(&o.StreamWait, 10*time.Second)
	if o.Pool <= 0 {
		o.Pool = 1
	}
	if o.Pending <= 0 {
		o.Pending = 16
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Links holds the links of all runs on this host.
type Links struct {
	opts   Options
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.Mutex
	runs   map[Key]*run
	closed bool
}

// New makes the directory. Runs come by Prepare, also those that an earlier agent left.
func New(opts Options) (*Links, error) {
	if err := os.MkdirAll(opts.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("directory for links: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Links{opts: opts.withDefaults(), ctx: ctx, cancel: cancel, runs: make(map[Key]*run)}, nil
}

// Close ends all connections and listeners and waits for what they started. The runs' directories stay for the next agent.
func (l *Links) Close() error {
	l.mu.Lock()
	l.closed = true
	runs := make([]*run, 0, len(l.runs))
	for _, r := range l.runs {
		runs = append(runs, r)
	}
	l.mu.Unlock()
	l.cancel()
	for _, r := range runs {
		r.close()
	}
	return nil
}

// Prepare makes the run's directory and listens in it. Mount the directory read-only; its one socket may be reached by root
// only. Called again, also by a later agent, it listens at the same path.
func (l *Links) Prepare(key Key) (dir string, err error) {
	dir = l.dir(key)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return "", ErrClosed
	}
	if _, there := l.runs[key]; there {
		return dir, nil
	}
	if key.Workspace == "" || filepath.Base(key.Workspace) != key.Workspace || key.Workspace == ".." {
		return "", fmt.Errorf("workspace id %q cannot be a directory's name", key.Workspace)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("directory of run %s/%d: %w", key.Workspace, key.Epoch, err)
	}
	listener, err := listen(dir)
	if err != nil {
		return "", fmt.Errorf("listen for run %s/%d: %w", key.Workspace, key.Epoch, err)
	}
	r := newRun(l.ctx, key, l.opts, listener)
	l.runs[key] = r
	r.start(r.accept)
	return dir, nil
}

func (l *Links) dir(key Key) string {
	return filepath.Join(l.opts.Dir, key.Workspace+"-"+strconv.FormatInt(key.Epoch, 10))
}

func (l *Links) run(key Key) (*run, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, ok := l.runs[key]
	if !ok {
		return nil, fmt.Errorf("run %s/%d: %w", key.Workspace, key.Epoch, ErrUnknownRun)
	}
	return r, nil
}

// Attach says which process, by its id on the host, is the first of the run's container. Only it and its direct children,
// running as root, are listened to. Another id than before drops the connections of the old one.
func (l *Links) Attach(key Key, enginePID int) error {
	r, err := l.run(key)
	if err != nil {
		return err
	}
	if enginePID <= 1 {
		return fmt.Errorf("attach run %s/%d: process id %d cannot be a container's", key.Workspace, key.Epoch, enginePID)
	}
	r.attach(enginePID)
	return nil
}

// Configure gives the run its full configuration, waits until carrel-init has made it true, and tells what it found. It is sent
// again at every new connection. A *RefusedError says what to change. Called again it changes the configuration live: a
// session whose key is no longer listed is closed.
func (l *Links) Configure(ctx context.Context, key Key, cfg Config) (Found, error) {
	r, err := l.run(key)
	if err != nil {
		return Found{}, err
	}
	return r.configure(ctx, cfg)
}

// Update changes who may log in, and the host certificate, of a configured run.
func (l *Links) Update(ctx context.Context, key Key, authorizedKeys []string, hostCertificate string) error {
	r, err := l.run(key)
	if err != nil {
		return err
	}
	cfg, ok := r.configuration()
	if !ok {
		return fmt.Errorf("update run %s/%d: it was never configured", key.Workspace, key.Epoch)
	}
	cfg.AuthorizedKeys, cfg.HostCertificate = authorizedKeys, hostCertificate
	_, err = r.configure(ctx, cfg)
	return err
}

// Ready is closed once the run has first been configured; nil for an unknown run.
func (l *Links) Ready(key Key) <-chan struct{} {
	r, err := l.run(key)
	if err != nil {
		return nil
	}
	return r.ready
}

// Status tells how the run's link is.
func (l *Links) Status(key Key) (Status, error) {
	r, err := l.run(key)
	if err != nil {
		return Status{}, err
	}
	return r.status(), nil
}

// OpenStream gives a connection to the run on which h was sent; all else on it is the stream's bytes. It is a *net.UnixConn.
func (l *Links) OpenStream(ctx context.Context, key Key, h stream.Hello) (net.Conn, error) {
	r, err := l.run(key)
	if err != nil {
		return nil, err
	}
	return r.openStream(ctx, h)
}

// Stop tells open sessions the reason and then ends everything inside within grace; 0 takes carrel-init's default. It returns
// when that was taken up, not when it is done; nil too when the connection ended over it. The engine's own stop should follow.
func (l *Links) Stop(ctx context.Context, key Key, reason string, grace time.Duration) error {
	r, err := l.run(key)
	if err != nil {
		return err
	}
	return r.stop(ctx, reason, grace)
}

// Activity tells what goes on inside.
func (l *Links) Activity(ctx context.Context, key Key) (Activity, error) {
	r, err := l.run(key)
	if err != nil {
		return Activity{}, err
	}
	return r.activity(ctx)
}

// Forget ends the run's connections and removes its directory. An unknown run's directory is removed too.
func (l *Links) Forget(key Key) error {
	l.mu.Lock()
	r := l.runs[key]
	delete(l.runs, key)
	l.mu.Unlock()
	if r != nil {
		r.close()
	}
	if err := os.RemoveAll(l.dir(key)); err != nil {
		return fmt.Errorf("remove link directory of run %s/%d: %w", key.Workspace, key.Epoch, err)
	}
	return nil
}
