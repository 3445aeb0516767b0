package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"
)

// acceptPause is the wait before the next try when the process has no file descriptor left.
const acceptPause = 50 * time.Millisecond

// forwards are a connection's -R listeners.
type forwards struct {
	server *Server
	mu     sync.Mutex
	open   map[string][]net.Listener
	closed bool
}

func newForwards(s *Server) *forwards {
	return &forwards{server: s, open: make(map[string][]net.Listener)}
}

type tcpForward struct {
	Host string
	Port uint32
}

// listenTCP serves -R. It binds loopback only, whatever address was asked for, as OpenSSH does without GatewayPorts; port 0
// takes a free one, which the reply tells.
func (f *forwards) listenTCP(ctx context.Context, conn *ssh.ServerConn, payload []byte) (bool, []byte) {
	var msg tcpForward
	if ssh.Unmarshal(payload, &msg) != nil || msg.Port > 65535 {
		return false, nil
	}
	listeners, port, err := listenLoopback(ctx, msg.Port)
	if err != nil {
		f.server.refused(net.JoinHostPort(msg.Host, strconv.Itoa(int(msg.Port))), err)
		return false, nil
	}
	key := tcpKey(msg.Host, port)
	if !f.add(key, listeners) {
		closeListeners(listeners)
		return false, nil
	}
	for _, l := range listeners {
		f.server.start(func() {
			f.acceptAll(ctx, conn, l, "forwarded-tcpip", func(c net.Conn) []byte {
				origin, _ := c.RemoteAddr().(*net.TCPAddr)
				return ssh.Marshal(struct {
					Host       string
					Port       uint32
					OriginHost string
					OriginPort uint32
				}{msg.Host, port, origin.IP.String(), uint32(origin.Port)})
			})
		})
	}
	if msg.Port == 0 {
		return true, ssh.Marshal(struct{ Port uint32 }{port})
	}
	return true, nil
}

// listenLoopback listens on 127.0.0.1 and, where the container has it, on the same port of ::1.
func listenLoopback(ctx context.Context, port uint32) ([]net.Listener, uint32, error) {
	var lc net.ListenConfig
	v4, err := lc.Listen(ctx, "tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	if err != nil {
		return nil, 0, err
	}
	got := v4.Addr().(*net.TCPAddr).Port
	listeners := []net.Listener{v4}
	if v6, err := lc.Listen(ctx, "tcp6", net.JoinHostPort("::1", strconv.Itoa(got))); err == nil {
		listeners = append(listeners, v6)
	}
	return listeners, uint32(got), nil
}

func tcpKey(host string, port uint32) string {
	return "tcp " + net.JoinHostPort(host, strconv.Itoa(int(port)))
}

func (f *forwards) cancelTCP(payload []byte) bool {
	var msg tcpForward
	return ssh.Unmarshal(payload, &msg) == nil && f.remove(tcpKey(msg.Host, msg.Port))
}

// listenUnix serves -R of a unix socket. The socket is made with mode 0600. A path that is there is refused, unless it is a
// socket of the user's that nobody listens on any more.
func (f *forwards) listenUnix(ctx context.Context, conn *ssh.ServerConn, payload []byte) bool {
	var msg struct{ Path string }
	if ssh.Unmarshal(payload, &msg) != nil || msg.Path == "" {
		return false
	}
	l, err := listenPrivate(ctx, f.server.socketPath(msg.Path))
	if err != nil {
		f.server.refused(msg.Path, err)
		return false
	}
	if !f.add("unix "+msg.Path, []net.Listener{l}) {
		l.Close()
		return false
	}
	f.server.start(func() {
		f.acceptAll(ctx, conn, l, "forwarded-streamlocal@openssh.com", func(net.Conn) []byte {
			return ssh.Marshal(struct{ Path, Reserved string }{msg.Path, ""})
		})
	})
	return true
}

func (f *forwards) cancelUnix(payload []byte) bool {
	var msg struct{ Path string }
	return ssh.Unmarshal(payload, &msg) == nil && f.remove("unix "+msg.Path)
}

// listenPrivate listens on path with mode 0600 from the first moment: Linux takes a socket file's mode from the socket.
func listenPrivate(ctx context.Context, path string) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var inner error
		if err := raw.Control(func(fd uintptr) { inner = unix.Fchmod(int(fd), 0o600) }); err != nil {
			return err
		}
		return inner
	}}
	l, err := lc.Listen(ctx, "unix", path)
	if errors.Is(err, syscall.EADDRINUSE) && staleSocket(path) {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove old socket: %w", err)
		}
		l, err = lc.Listen(ctx, "unix", path)
	}
	return l, err
}

func staleSocket(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || info.Mode()&os.ModeSocket == 0 {
		return false
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Getuid() {
		return false
	}
	conn, err := net.Dial("unix", path)
	if err == nil {
		conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

func (f *forwards) add(key string, listeners []net.Listener) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, taken := f.open[key]; taken || f.closed || len(f.open) >= f.server.cfg.Limits.Listeners {
		return false
	}
	f.open[key] = listeners
	return true
}

func (f *forwards) remove(key string) bool {
	f.mu.Lock()
	listeners, ok := f.open[key]
	delete(f.open, key)
	f.mu.Unlock()
	closeListeners(listeners)
	return ok
}

func (f *forwards) closeAll() {
	f.mu.Lock()
	f.closed = true
	var all []net.Listener
	for _, listeners := range f.open {
		all = append(all, listeners...)
	}
	clear(f.open)
	f.mu.Unlock()
	closeListeners(all)
}

func closeListeners(listeners []net.Listener) {
	for _, l := range listeners {
		l.Close()
	}
}

// acceptAll turns each connection into a channel to the client. One above the channel limit is closed at once.
func (f *forwards) acceptAll(ctx context.Context, conn *ssh.ServerConn, l net.Listener, kind string, extra func(net.Conn) []byte) {
	s := f.server
	for {
		c, err := l.Accept()
		if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ECONNABORTED) {
			select {
			case <-ctx.Done():
			case <-time.After(acceptPause):
			}
			continue
		}
		if err != nil {
			return
		}
		if s.takeChannel(false) != "" {
			c.Close()
			continue
		}
		s.start(func() {
			defer s.giveChannel()
			ch, requests, err := conn.OpenChannel(kind, extra(c))
			if err != nil {
				c.Close()
				return
			}
			s.relay(ctx, ch, requests, c)
		})
	}
}

// socketPath makes a relative path start at the home.
func (s *Server) socketPath(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(s.homeDir(), p)
}

// agentSocket is where programs inside reach the user's ssh-agent; one per connection, made when first asked for.
type agentSocket struct {
	mu       sync.Mutex
	path     string
	dir      string // ours to remove; empty when the directory was given
	listener net.Listener
}

func (a *agentSocket) open(ctx context.Context, s *Server, conn *ssh.ServerConn) (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.path != "" {
		return a.path, nil
	}
	dir := s.cfg.RuntimeDir
	if dir == "" {
		made, err := os.MkdirTemp("", "carrel-agent-")
		if err != nil {
			return "", fmt.Errorf("directory for the agent socket: %w", err)
		}
		dir, a.dir = made, made
	}
	path := filepath.Join(dir, "agent.sock")
	l, err := listenPrivate(ctx, path)
	if err != nil {
		return "", fmt.Errorf("agent socket: %w", err)
	}
	a.path, a.listener = path, l
	if !s.forwards.add("agent", []net.Listener{l}) {
		l.Close()
		return "", errors.New("too many listeners on this connection")
	}
	s.start(func() {
		s.forwards.acceptAll(ctx, conn, l, "auth-agent@openssh.com", func(net.Conn) []byte { return nil })
	})
	return path, nil
}

func (a *agentSocket) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.listener != nil {
		a.listener.Close()
	}
	if a.dir != "" {
		_ = os.RemoveAll(a.dir) // what a program of the user put there may resist; it is the user's
	}
}
