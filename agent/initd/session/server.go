// Package session is the SSH server of one connection into a workspace; it runs with the rights of the workspace's user.
package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
)

// Config is what a connection needs. All of it is fixed for the connection's life but the keys (SetKeys).
type Config struct {
	// Signer signs for the host key; the private key itself is elsewhere.
	Signer ssh.Signer
	// Certificate is the host's certificate over Signer's key; nil offers the plain key only.
	Certificate *ssh.Certificate
	// Keys may log in.
	Keys []ssh.PublicKey
	// Account is whose workspace this is.
	Account Account
	// Env is the environment of every command: the image's, then CARREL_* and the GPU variables.
	Env []string
	// RuntimeDir is a directory of this connection alone, mode 0700, for the forwarded agent's socket. It must be there.
	RuntimeDir string
	// PasswdFile is where the login shell is read from, anew for each command.
	PasswdFile string
	// Limits bound what one connection may hold.
	Limits Limits
	// Log gets state changes.
	Log *slog.Logger
	// OnLogin, when set, is called once with the key that signed the handshake.
	OnLogin func(fingerprint string)
	// OnTyped, when set, is called when something was typed on a terminal, at most once a second.
	OnTyped func()
}

// Account is the workspace's user.
type Account struct {
	Login string
	UID   int
	GID   int
	Home  string
}

// Limits bound one connection. The zero value of a field means its default.
type Limits struct {
	// Handshake is the longest that login may take. Default 30 s.
	Handshake time.Duration
	// AuthTries is the number of the rejected key at which the connection ends, so that one fewer may be offered before the right
	// one. Default 20: more than an ssh-agent usually holds. An odd number counts as the even one below.
	AuthTries int
	// Channels is how many channels may be open. Default 1,000: an editor opens one per forwarded request.
	Channels int
	// Listeners is how many -R listeners may be open. Default 100.
	Listeners int
	// Dial is the longest that a forward's connect may take. Default 30 s.
	Dial time.Duration
	// KeepAlive is the time between questions to the client; after KeepAliveMisses without an answer the connection ends.
	// Defaults 30 s and 10.
	KeepAlive       time.Duration
	KeepAliveMisses int
	// PTYQuiet is how long a terminal must be silent, after its first process ended, before it counts as drained while
	// background jobs still hold it. Default 100 ms.
	PTYQuiet time.Duration
}

func (l Limits) withDefaults() Limits {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	setInt := func(n *int, v int) {
		if *n <= 0 {
			*n = v
		}
	}
	set(&l.Handshake, 30*time.Second)
	set(&l.Dial, 30*time.Second)
	set(&l.KeepAlive, 30*time.Second)
	set(&l.PTYQuiet, 100*time.Millisecond)
	setInt(&l.AuthTries, 20)
	setInt(&l.Channels, 1000)
	setInt(&l.Listeners, 100)
	setInt(&l.KeepAliveMisses, 10)
	return l
}

// ErrRevoked ends a connection whose key was taken off the list.
var ErrRevoked = errors.New("this key may no longer log in")

// Server serves one SSH connection.
type Server struct {
	cfg    Config
	log    *slog.Logger
	ctx    context.Context // ends when the connection should; its cause says why
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup // everything that the connection started

	mu       sync.Mutex
	keys     map[string]bool // wire form of each key
	loggedIn string          // wire form of the key that signed
	conn     *ssh.ServerConn
	commands map[*command]struct{}
	channels int
	ended    bool
	noMore   bool

	forwards *forwards
	agent    agentSocket
}

// New makes a server for one connection.
func New(cfg Config) *Server {
	cfg.Limits = cfg.Limits.withDefaults()
	if cfg.PasswdFile == "" {
		cfg.PasswdFile = "/etc/passwd"
	}
	s := &Server{cfg: cfg, log: cfg.Log, commands: make(map[*command]struct{})}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.keys = keySet(cfg.Keys)
	s.forwards = newForwards(s)
	return s
}

// Serve does the handshake and serves until the connection ends, ctx ends, or Stop. All commands still running then get
// SIGHUP, listeners are closed, and everything that it started has ended when it returns.
//
//nolint:contextcheck // the connection's own context is what all its parts hang on; parent ends it
func (s *Server) Serve(parent context.Context, raw net.Conn) error {
	ctx := s.ctx
	defer s.cancel(nil)
	defer context.AfterFunc(parent, func() { s.cancel(context.Cause(parent)) })()
	defer raw.Close()
	stopHandshake := context.AfterFunc(ctx, func() { raw.Close() })
	conn, channels, requests, err := s.handshake(raw)
	if !stopHandshake() && err == nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("ssh handshake: %w", err)
	}
	s.log.Info("ssh login", "key", conn.Permissions.Extensions[fingerprintKey], "client", string(conn.ClientVersion()))
	if s.cfg.OnLogin != nil {
		s.cfg.OnLogin(conn.Permissions.Extensions[fingerprintKey])
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	s.start(func() { s.globalRequests(ctx, conn, requests) })
	s.start(func() { s.keepAlive(ctx, conn) })
	for nc := range channels {
		s.accept(ctx, conn, nc)
	}
	cause := context.Cause(ctx) // nil when the client ended it
	s.end()
	s.wg.Wait()
	s.agent.close()
	return cause
}

// start runs fn as a part of the connection.
func (s *Server) start(fn func()) {
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		fn()
	}()
}

// end closes what the connection holds; the caller then waits on wg.
func (s *Server) end() {
	s.cancel(nil)
	s.forwards.closeAll()
	s.mu.Lock()
	s.ended = true
	commands := make([]*command, 0, len(s.commands))
	for c := range s.commands {
		commands = append(commands, c)
	}
	s.mu.Unlock()
	for _, c := range commands {
		c.hangUp()
	}
}

// accept starts one channel, or refuses it with a reason that says what to do.
func (s *Server) accept(ctx context.Context, conn *ssh.ServerConn, nc ssh.NewChannel) {
	var serve func()
	switch nc.ChannelType() {
	case "session":
		serve = func() { s.serveSession(ctx, conn, nc) }
	case "direct-tcpip":
		serve = func() { s.directTCP(ctx, nc) }
	case "direct-streamlocal@openssh.com":
		serve = func() { s.directUnix(ctx, nc) }
	default:
		reject(nc, ssh.UnknownChannelType, "this server has no channels of type "+printable(nc.ChannelType()))
		return
	}
	if reason := s.takeChannel(nc.ChannelType() == "session"); reason != "" {
		reject(nc, ssh.ResourceShortage, reason)
		return
	}
	s.start(func() {
		defer s.giveChannel()
		serve()
	})
}

func (s *Server) takeChannel(isSession bool) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if isSession && s.noMore {
		return "this connection asked for no more sessions"
	}
	if s.channels >= s.cfg.Limits.Channels {
		return fmt.Sprintf("this connection already has %d channels open: close some, or open another connection", s.channels)
	}
	s.channels++
	return ""
}

func (s *Server) giveChannel() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.channels--
}

// SetKeys replaces the keys that may log in. A connection whose own key is not among them ends with ErrRevoked.
func (s *Server) SetKeys(keys []ssh.PublicKey) {
	set := keySet(keys)
	s.mu.Lock()
	s.keys = set
	revoked := s.loggedIn != "" && !set[s.loggedIn]
	s.mu.Unlock()
	if revoked {
		s.Stop(ErrRevoked.Error(), ErrRevoked)
	}
}

// Stop writes reason as one line on the standard error of every open session channel and ends the connection; Serve
// returns cause.
func (s *Server) Stop(reason string, cause error) {
	s.mu.Lock()
	commands := make([]*command, 0, len(s.commands))
	for c := range s.commands {
		commands = append(commands, c)
	}
	s.mu.Unlock()
	told := make(chan struct{})
	go func() {
		defer close(told)
		var wg sync.WaitGroup
		for _, c := range commands {
			wg.Go(func() { c.tell(reason) })
		}
		wg.Wait()
	}()
	// A client that does not read must not hold up the stop: after a second the connection closes under the writers.
	select {
	case <-told:
	case <-time.After(time.Second):
	}
	s.cancel(cause)
	<-told
}

func reject(nc ssh.NewChannel, reason ssh.RejectionReason, text string) {
	_ = nc.Reject(reason, text) // fails only when the connection is gone
}

// printable makes a client's text safe to send back and to log.
func printable(s string) string {
	if len(s) > 64 {
		s = s[:64] + "..."
	}
	return fmt.Sprintf("%+q", s)
}
