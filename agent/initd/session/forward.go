package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"

	"golang.org/x/crypto/ssh"
)

// duplex is a stream whose two directions end separately.
type duplex interface {
	net.Conn
	CloseWrite() error
}

// directTCP serves -L and -D: it dials a target inside the container, with the user's rights.
func (s *Server) directTCP(ctx context.Context, nc ssh.NewChannel) {
	var msg struct {
		Host       string
		Port       uint32
		OriginHost string
		OriginPort uint32
	}
	if ssh.Unmarshal(nc.ExtraData(), &msg) != nil || msg.Port == 0 || msg.Port > 65535 {
		reject(nc, ssh.ConnectionFailed, "bad forward target")
		return
	}
	conn, err := s.dialTCP(ctx, msg.Host, strconv.Itoa(int(msg.Port)))
	s.join(ctx, nc, conn, err)
}

// dialTCP connects. "localhost" means this container on both families, whatever its hosts file says.
func (s *Server) dialTCP(ctx context.Context, host, port string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Limits.Dial)
	defer cancel()
	hosts := []string{host}
	if host == "localhost" || host == "" {
		hosts = []string{"127.0.0.1", "::1"}
	}
	var first error
	for _, h := range hosts {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(h, port))
		if err == nil {
			return conn, nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, first
}

// directUnix serves -L to a unix socket. A path that is missing or forbidden is refused at once.
func (s *Server) directUnix(ctx context.Context, nc ssh.NewChannel) {
	var msg struct {
		Path     string
		Reserved string
		Unused   uint32
	}
	if ssh.Unmarshal(nc.ExtraData(), &msg) != nil || msg.Path == "" {
		reject(nc, ssh.ConnectionFailed, "bad socket path")
		return
	}
	dialCtx, cancel := context.WithTimeout(ctx, s.cfg.Limits.Dial)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(dialCtx, "unix", s.socketPath(msg.Path))
	s.join(ctx, nc, conn, err)
}

// join accepts nc and relays it to conn, or refuses it when the dial failed.
func (s *Server) join(ctx context.Context, nc ssh.NewChannel, conn net.Conn, err error) {
	if err != nil {
		reject(nc, ssh.ConnectionFailed, err.Error())
		return
	}
	ch, requests, err := nc.Accept()
	if err != nil {
		conn.Close()
		return
	}
	s.relay(ctx, ch, requests, conn)
}

// relay moves bytes both ways, passing each direction's end on, until both have ended or one failed. It returns when the
// client has closed the channel and what it sent before has been passed on.
func (s *Server) relay(ctx context.Context, ch ssh.Channel, requests <-chan *ssh.Request, conn net.Conn) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	outward, inward := make(chan struct{}), make(chan struct{})
	s.start(func() {
		defer close(outward)
		if err := pump(ch, conn); err != nil {
			ch.Close()
			conn.Close()
		}
		_ = ch.CloseWrite()
	})
	s.start(func() {
		defer close(inward)
		if err := pump(conn, ch); err != nil {
			ch.Close()
			conn.Close()
		}
		if d, ok := conn.(duplex); ok {
			_ = d.CloseWrite()
		}
	})
	s.start(func() {
		<-outward
		<-inward
		ch.Close()
		conn.Close()
	})
	ssh.DiscardRequests(requests) // ends when the client closed the channel, or is gone
	<-inward
	conn.Close()
}

func pump(dst io.Writer, src io.Reader) error {
	_, err := io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, make([]byte, 32<<10))
	if errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// globalRequests answers the requests that belong to no channel.
func (s *Server) globalRequests(ctx context.Context, conn *ssh.ServerConn, requests <-chan *ssh.Request) {
	for req := range requests {
		ok, reply := false, []byte(nil)
		switch req.Type {
		case "tcpip-forward":
			ok, reply = s.forwards.listenTCP(ctx, conn, req.Payload)
		case "cancel-tcpip-forward":
			ok = s.forwards.cancelTCP(req.Payload)
		case "streamlocal-forward@openssh.com":
			ok = s.forwards.listenUnix(ctx, conn, req.Payload)
		case "cancel-streamlocal-forward@openssh.com":
			ok = s.forwards.cancelUnix(req.Payload)
		case "no-more-sessions@openssh.com":
			s.mu.Lock()
			s.noMore = true
			s.mu.Unlock()
			ok = true
		case "keepalive@openssh.com":
			ok = true
		}
		if req.WantReply {
			_ = req.Reply(ok, reply) // fails only when the connection is gone
		}
	}
}

// refused tells the log why a listener was not made; the protocol has no place for a reason.
func (s *Server) refused(what string, err error) {
	s.log.Info("remote forward refused", "bind", what, "err", fmt.Sprint(err))
}
