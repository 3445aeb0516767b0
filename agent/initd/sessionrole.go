package initd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"

	"github.com/carrel-dev/carrel/agent/initd/control"
	"github.com/carrel-dev/carrel/agent/initd/session"
)

const (
	setupTimeout = 10 * time.Second
	summonPause  = 50 * time.Millisecond // between tries to reach serve again
	signPatience = time.Minute           // how long a handshake or rekey waits for serve
)

var errStopped = errors.New("the workspace stops")

// sessionMain is the session role: one SSH connection, with the user's rights.
func sessionMain(log *slog.Logger) int {
	giveUpOOMProtection()
	surviveBrokenLog()
	// So that no process of the same user can look inside and have things signed.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		log.Error("hide memory", "err", err)
		return exitFailed
	}
	if err := runSession(log); err != nil && !errors.Is(err, errStopped) && !errors.Is(err, io.EOF) {
		log.Info("session ended", "err", err)
	}
	return 0
}

// giveUpOOMProtection undoes what process 1 asked for itself: a user's programs are the ones to end first.
func giveUpOOMProtection() {
	const path = "/proc/self/oom_score_adj"
	text, err := os.ReadFile(path)
	if err != nil {
		return
	}
	if n, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && n < 0 {
		_ = os.WriteFile(path, []byte("0"), 0) // raising is always allowed
	}
}

func runSession(log *slog.Logger) error {
	for _, fd := range []int{fdConnection, fdControl, fdSessionSummon} {
		unix.CloseOnExec(fd)
	}
	file := os.NewFile(fdConnection, "connection")
	conn, err := net.FileConn(file)
	if err != nil {
		return fmt.Errorf("connection: %w", err)
	}
	file.Close()
	link, err := control.FileConn(os.NewFile(fdControl, "control"))
	if err != nil {
		return err
	}
	var first control.ToSession
	timer := time.AfterFunc(setupTimeout, func() { link.Close() })
	if err := link.Receive(&first); err != nil || first.Setup == nil {
		return fmt.Errorf("no setup from serve: %w", err)
	}
	timer.Stop()
	l := &serveLink{id: first.Setup.ID, summon: fdSessionSummon, conn: link, waiting: make(map[uint64]chan *control.Signed)}
	cfg, err := sessionConfig(first.Setup, l, log)
	if err != nil {
		return err
	}
	if err := os.Chdir("/"); err != nil {
		return fmt.Errorf("change directory: %w", err)
	}
	server := session.New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go l.run(ctx, server) // ends with the process
	return server.Serve(ctx, conn)
}

func sessionConfig(setup *control.Setup, l *serveLink, log *slog.Logger) (session.Config, error) {
	host, err := ssh.ParsePublicKey(setup.HostKey)
	if err != nil {
		return session.Config{}, fmt.Errorf("host key: %w", err)
	}
	keys, err := parseKeys(setup.Keys)
	if err != nil {
		return session.Config{}, err
	}
	cfg := session.Config{
		Signer: &remoteSigner{key: host, link: l}, Keys: keys, Env: setup.Env, RuntimeDir: setup.RuntimeDir, Log: log,
		Account: session.Account{Login: setup.Login, UID: setup.UID, GID: setup.GID, Home: setup.Home},
		OnLogin: l.login,
		OnTyped: func() { l.send(control.ToServe{Typed: true}) },
	}
	if len(setup.Certificate) > 0 {
		key, err := ssh.ParsePublicKey(setup.Certificate)
		cert, ok := key.(*ssh.Certificate)
		if err != nil || !ok {
			return session.Config{}, fmt.Errorf("host certificate: %w", err)
		}
		cfg.Certificate = cert
	}
	return cfg, nil
}

func parseKeys(wire [][]byte) ([]ssh.PublicKey, error) {
	keys := make([]ssh.PublicKey, 0, len(wire))
	for _, w := range wire {
		key, err := ssh.ParsePublicKey(w)
		if err != nil {
			return nil, fmt.Errorf("authorized key: %w", err)
		}
		keys = append(keys, key)
	}
	return keys, nil
}

// serveLink is a session's line to serve. It outlives serve: when a serve is gone, the next one is summoned, and signatures
// that were asked for are asked for again.
type serveLink struct {
	id     string
	summon int

	mu       sync.Mutex
	conn     *control.Conn
	loggedIn *control.Login
	next     uint64
	pending  []*control.Sign
	waiting  map[uint64]chan *control.Signed
}

// run reads what serve says until ctx ends.
func (l *serveLink) run(ctx context.Context, server *session.Server) {
	for ctx.Err() == nil {
		l.mu.Lock()
		conn := l.conn
		l.mu.Unlock()
		for {
			var msg control.ToSession
			if err := conn.Receive(&msg); err != nil {
				break
			}
			l.heard(&msg, server)
		}
		conn.Close()
		l.reconnect(ctx)
	}
}

func (l *serveLink) heard(msg *control.ToSession, server *session.Server) {
	switch {
	case msg.Signed != nil:
		l.mu.Lock()
		answer := l.waiting[msg.Signed.ID]
		l.forget(msg.Signed.ID)
		l.mu.Unlock()
		if answer != nil {
			answer <- msg.Signed
		}
	case msg.Keys != nil:
		if keys, err := parseKeys(msg.Keys.Keys); err == nil {
			server.SetKeys(keys)
		}
	case msg.Stop != nil:
		server.Stop(msg.Stop.Reason, errStopped)
	}
}

func (l *serveLink) reconnect(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
			return
		case <-time.After(summonPause):
		}
		conn, err := control.Summon(l.summon)
		if err != nil {
			continue
		}
		l.mu.Lock()
		l.conn = conn
		err = conn.Send(control.ToServe{Hello: &control.Hello{ID: l.id, Login: l.loggedIn}})
		for _, sign := range l.pending {
			err = errors.Join(err, conn.Send(control.ToServe{Sign: sign}))
		}
		l.mu.Unlock()
		if err == nil {
			return
		}
		conn.Close()
	}
}

// send tells serve something that may be lost.
func (l *serveLink) send(msg control.ToServe) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.conn.Send(msg)
}

func (l *serveLink) login(fingerprint string) {
	login := &control.Login{Fingerprint: fingerprint}
	l.mu.Lock()
	l.loggedIn = login
	l.mu.Unlock()
	l.send(control.ToServe{Login: login})
}

// sign asks for one signature and waits for it, over a restart of serve if need be.
func (l *serveLink) sign(data []byte, algorithm string) (*ssh.Signature, error) {
	l.mu.Lock()
	l.next++
	ask := &control.Sign{ID: l.next, Data: data, Algorithm: algorithm}
	answer := make(chan *control.Signed, 1)
	l.waiting[ask.ID] = answer
	l.pending = append(l.pending, ask)
	_ = l.conn.Send(control.ToServe{Sign: ask}) // when serve is gone, reconnect sends it
	l.mu.Unlock()
	timer := time.NewTimer(signPatience)
	defer timer.Stop()
	select {
	case signed := <-answer:
		if signed.Err != "" {
			return nil, fmt.Errorf("host key signature: %s", signed.Err)
		}
		return &ssh.Signature{Format: signed.Format, Blob: signed.Blob}, nil
	case <-timer.C:
		l.mu.Lock()
		l.forget(ask.ID)
		l.mu.Unlock()
		return nil, errors.New("host key signature: serve does not answer")
	}
}

// forget drops a question; mu is held.
func (l *serveLink) forget(id uint64) {
	delete(l.waiting, id)
	for i, p := range l.pending {
		if p.ID == id {
			l.pending = append(l.pending[:i], l.pending[i+1:]...)
			return
		}
	}
}

// remoteSigner signs with a key that this process does not have.
type remoteSigner struct {
	key  ssh.PublicKey
	link *serveLink
}

var _ ssh.AlgorithmSigner = (*remoteSigner)(nil)

func (r *remoteSigner) PublicKey() ssh.PublicKey { return r.key }

func (r *remoteSigner) Sign(_ io.Reader, data []byte) (*ssh.Signature, error) {
	return r.link.sign(data, "")
}

func (r *remoteSigner) SignWithAlgorithm(_ io.Reader, data []byte, algorithm string) (*ssh.Signature, error) {
	return r.link.sign(data, algorithm)
}
