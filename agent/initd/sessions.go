package initd

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"

	"github.com/carrel-dev/carrel/agent/initd/control"
)

const (
	maxSessions = 1000             // SSH connections at a time
	revokeWait  = 2 * time.Second  // a session whose key was removed has so long to end by itself
	sweepAfter  = 10 * time.Second // after serve's start: runtime directories that no session claimed are removed
	signTimeout = 30 * time.Second
)

// sessions are the session processes, also those that an earlier serve started.
type sessions struct {
	host   *host
	summon int // handed to every session
	dir    string
	log    *slog.Logger

	telling sync.Mutex // one at a time tells sessions who may log in; taken before mu

	mu    sync.Mutex
	live  map[string]*entry
	typed time.Time
	wg    sync.WaitGroup
}

// entry is one session process.
type entry struct {
	id    string
	conn  *control.Conn
	pidfd int    // -1 when the process has ended already
	key   string // fingerprint of the key that logged in; empty before
	gone  chan struct{}
}

func newSessions(h *host, summon int, log *slog.Logger) *sessions {
	return &sessions{host: h, summon: summon, dir: filepath.Join(RunDir, "sessions"), log: log, live: make(map[string]*entry)}
}

// begin starts a session process for conn. The caller keeps its own copy of conn and closes it.
func (s *sessions) begin(ctx context.Context, conn *net.UnixConn) error {
	cfg, err := s.host.current()
	if err != nil {
		return err
	}
	if n, _ := s.activity(); n >= maxSessions {
		return fmt.Errorf("%d SSH connections are open: close some first", n)
	}
	id := rand.Text()
	dir := filepath.Join(s.dir, id)
	if err := s.makeRuntimeDir(dir, cfg.user.UID, cfg.user.GID); err != nil {
		return err
	}
	ours, theirs, err := control.Pair()
	if err != nil {
		return err
	}
	defer theirs.Close()
	link, err := control.FileConn(ours)
	if err != nil {
		return err
	}
	pid, err := spawnSession(cfg, conn, theirs, s.summon)
	if err != nil {
		link.Close()
		_ = os.Remove(dir)
		return err
	}
	e := &entry{id: id, conn: link, pidfd: -1, gone: make(chan struct{})}
	s.adopt(e, pid)
	err = s.welcome(e, dir)
	s.wg.Go(func() { waitFor(pid) })
	s.wg.Go(func() { s.follow(ctx, e) })
	return err
}

// welcome sends the setup and lists the session, with no change of keys in between that it would miss.
func (s *sessions) welcome(e *entry, dir string) error {
	s.telling.Lock()
	defer s.telling.Unlock()
	cfg, err := s.host.current()
	if err != nil {
		return err
	}
	if err := e.conn.Send(control.ToSession{Setup: s.setup(cfg, e.id, dir)}); err != nil {
		return fmt.Errorf("set session up: %w", err)
	}
	return s.add(e)
}

func (s *sessions) setup(cfg *configuration, id, dir string) *control.Setup {
	setup := &control.Setup{
		ID: id, Login: cfg.user.Login, UID: cfg.user.UID, GID: cfg.user.GID, Home: cfg.user.Home,
		Env: s.host.environ(cfg), HostKey: cfg.signer.PublicKey().Marshal(), Keys: wireKeys(cfg.keys), RuntimeDir: dir,
	}
	if cfg.cert != nil {
		setup.Certificate = cfg.cert.Marshal()
	}
	return setup
}

func wireKeys(keys []ssh.PublicKey) [][]byte {
	out := make([][]byte, len(keys))
	for i, k := range keys {
		out[i] = k.Marshal()
	}
	return out
}

// makeRuntimeDir makes a session's own directory, which only its user can enter.
func (s *sessions) makeRuntimeDir(dir string, uid, gid int) error {
	if err := os.MkdirAll(s.dir, 0o711); err != nil {
		return fmt.Errorf("make session directory: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("make session directory: %w", err)
	}
	if err := os.Lchown(dir, uid, gid); err != nil {
		return fmt.Errorf("make session directory: %w", err)
	}
	return nil
}

func (s *sessions) add(e *entry) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.live) >= maxSessions {
		return fmt.Errorf("%d SSH connections are open: close some first", len(s.live))
	}
	if _, there := s.live[e.id]; there {
		return errors.New("session is there already")
	}
	s.live[e.id] = e
	return nil
}

func (s *sessions) remove(e *entry) {
	s.mu.Lock()
	if s.live[e.id] == e {
		delete(s.live, e.id)
	}
	s.mu.Unlock()
	e.conn.Close()
	close(e.gone)
}

func (s *sessions) adopt(e *entry, pid int) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		s.log.Debug("no pidfd for session", "err", err)
		fd = -1
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e.pidfd = fd
}

// follow answers one session until it ends: its socket pair closes with its process.
func (s *sessions) follow(ctx context.Context, e *entry) {
	for {
		var msg control.ToServe
		if err := e.conn.Receive(&msg); err != nil {
			break
		}
		s.heard(ctx, e, &msg)
	}
	s.mu.Lock()
	fd := e.pidfd
	e.pidfd = -1
	s.mu.Unlock()
	if fd >= 0 {
		unix.Close(fd)
	}
	s.remove(e)
	if err := os.RemoveAll(filepath.Join(s.dir, e.id)); err != nil {
		s.log.Warn("remove session directory", "err", err)
	}
}

func (s *sessions) heard(ctx context.Context, e *entry, msg *control.ToServe) {
	switch {
	case msg.Sign != nil:
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), signTimeout) // sessions outlive what began them
		defer cancel()
		reply := &control.Signed{ID: msg.Sign.ID}
		sig, err := s.host.sign(ctx, msg.Sign.Data, msg.Sign.Algorithm)
		if err != nil {
			reply.Err = err.Error()
		} else {
			reply.Format, reply.Blob = sig.Format, sig.Blob
		}
		_ = e.conn.Send(control.ToSession{Signed: reply}) // fails only when the session has ended
	case msg.Login != nil:
		s.mu.Lock()
		e.key = msg.Login.Fingerprint
		s.mu.Unlock()
		s.log.Info("ssh login", "session", e.id, "key", msg.Login.Fingerprint)
	case msg.Typed:
		s.mu.Lock()
		s.typed = time.Now()
		s.mu.Unlock()
	}
}

// receive takes back the sessions of an earlier serve.
func (s *sessions) receive(ctx context.Context, from *net.UnixConn) error {
	stop := context.AfterFunc(ctx, func() { from.Close() })
	defer stop()
	for {
		caller, err := control.Receive(from)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, control.ErrBadSummon):
			s.log.Warn("rendezvous", "err", err)
			continue
		case err != nil:
			return err
		}
		s.wg.Go(func() {
			if err := s.takeBack(ctx, caller); err != nil {
				s.log.Warn("take session back", "pid", caller.PID, "err", err)
				caller.Conn.Close()
			}
		})
	}
}

func (s *sessions) takeBack(ctx context.Context, c control.Caller) error {
	var msg control.ToServe
	if err := c.Conn.Receive(&msg); err != nil {
		return fmt.Errorf("first message: %w", err)
	}
	if msg.Hello == nil || msg.Hello.ID == "" || filepath.Base(msg.Hello.ID) != msg.Hello.ID {
		return errors.New("first message is no hello")
	}
	e := &entry{id: msg.Hello.ID, conn: c.Conn, pidfd: -1, gone: make(chan struct{})}
	if cfg, err := s.host.current(); err == nil && cfg.user.UID != c.UID {
		return fmt.Errorf("process of uid %d: sessions have %d", c.UID, cfg.user.UID)
	}
	if msg.Hello.Login != nil {
		e.key = msg.Hello.Login.Fingerprint
	}
	s.adopt(e, c.PID)
	if err := s.welcomeBack(e); err != nil {
		return err
	}
	s.log.Info("session taken back", "session", e.id, "pid", c.PID)
	s.follow(ctx, e)
	return nil
}

func (s *sessions) welcomeBack(e *entry) error {
	s.telling.Lock()
	defer s.telling.Unlock()
	if err := s.add(e); err != nil {
		return err
	}
	if cfg, err := s.host.current(); err == nil {
		_ = e.conn.Send(control.ToSession{Keys: &control.Keys{Keys: wireKeys(cfg.keys)}}) // fails only when the session has ended
	}
	return nil
}

func (s *sessions) all() []*entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*entry, 0, len(s.live))
	for _, e := range s.live {
		out = append(out, e)
	}
	return out
}

// setKeys calls commit and tells every session the keys that now may log in. One whose own key is gone ends itself, or is killed after revokeWait.
func (s *sessions) setKeys(keys []ssh.PublicKey, commit func()) {
	s.telling.Lock()
	defer s.telling.Unlock()
	commit()
	listed := map[string]bool{"": true}
	for _, k := range keys {
		listed[ssh.FingerprintSHA256(k)] = true
	}
	for _, e := range s.all() {
		_ = e.conn.Send(control.ToSession{Keys: &control.Keys{Keys: wireKeys(keys)}}) // fails only when the session has ended
		s.mu.Lock()
		revoked := !listed[e.key]
		s.mu.Unlock()
		if revoked {
			s.wg.Go(func() { s.killAfter(e, revokeWait) })
		}
	}
}

func (s *sessions) killAfter(e *entry, wait time.Duration) {
	select {
	case <-e.gone:
	case <-time.After(wait):
		s.kill(e)
	}
}

// stop tells every session to say goodbye, and kills those that have not ended within wait.
func (s *sessions) stop(reason string, wait time.Duration) {
	deadline := time.NewTimer(wait)
	defer deadline.Stop()
	entries := s.all()
	for _, e := range entries {
		_ = e.conn.Send(control.ToSession{Stop: &control.Goodbye{Reason: reason}})
	}
	late := false
	for _, e := range entries {
		if !late {
			select {
			case <-e.gone:
				continue
			case <-deadline.C:
				late = true
			}
		}
		s.kill(e)
	}
}

func (s *sessions) kill(e *entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.pidfd >= 0 {
		_ = unix.PidfdSendSignal(e.pidfd, syscall.SIGKILL, nil, 0)
	}
}

func (s *sessions) activity() (count int, typed time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.live), s.typed
}

// sweep removes, once, the directories of sessions that ended while no serve was there.
func (s *sessions) sweep(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(sweepAfter):
	}
	dirs, err := os.ReadDir(s.dir)
	if err != nil {
		return nil // none was ever made
	}
	for _, d := range dirs {
		s.mu.Lock()
		_, live := s.live[d.Name()]
		s.mu.Unlock()
		if live {
			continue
		}
		if info, err := d.Info(); err != nil || time.Since(info.ModTime()) < sweepAfter {
			continue
		}
		if err := os.RemoveAll(filepath.Join(s.dir, d.Name())); err != nil {
			s.log.Warn("remove session directory", "err", err)
		}
	}
	return nil
}
