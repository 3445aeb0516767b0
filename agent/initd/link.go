package initd

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/carrel-dev/carrel/agent/initlink/preamble"
	"github.com/carrel-dev/carrel/gen/go/carrel/agent/v1/agentv1connect"
	"github.com/carrel-dev/carrel/proto/stream"
)

// Waits between dials of the agent, which may just be restarting: from the first to the last, doubled, with jitter.
const (
	minRedial   = 20 * time.Millisecond
	maxRedial   = 500 * time.Millisecond
	dialTimeout = 5 * time.Second
)

// address says where the agent is. The kind leaves room for addresses that need a credential; a unix socket needs none.
type address struct {
	network, address string
}

func parseAddress(text string) (address, error) {
	kind, rest, ok := strings.Cut(text, ":")
	if !ok || kind != "unix" || !strings.HasPrefix(rest, "/") {
		return address{}, fmt.Errorf("link address %q: use unix:/absolute/path", text)
	}
	return address{"unix", rest}, nil
}

// dial connects and says what the connection is for.
func (a address) dial(ctx context.Context, p preamble.Preamble) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, a.network, a.address)
	if err != nil {
		return nil, fmt.Errorf("dial the agent: %w", err)
	}
	if err := preamble.Write(conn, p); err != nil {
		conn.Close()
		return nil, fmt.Errorf("greet the agent: %w", err)
	}
	return conn, nil
}

// keepLink holds the control connection and answers the agent's calls on it, dialling again whenever it ends.
func (s *serve) keepLink(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.Handle(agentv1connect.NewWorkspaceServiceHandler(&service{serve: s, streams: ctx}))
	wait := minRedial
	for ctx.Err() == nil {
		conn, err := s.link.dial(ctx, preamble.Preamble{Kind: preamble.Control})
		if err == nil {
			begin := time.Now()
			s.log.Debug("link", "up", true)
			err = stream.ServeTurned(ctx, conn, mux, stream.TurnedOptions{})
			if time.Since(begin) > maxRedial {
				wait = minRedial
			}
		}
		s.log.Debug("link", "up", false, "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(wait/2 + rand.N(wait)):
		}
		wait = min(2*wait, maxRedial)
	}
	return nil
}

// dialBack opens one connection and waits for what the agent wants on it. A dialled-back connection may lie in the agent's pool for as long as the link lives. It ends with
// ctx, or when the agent closes it.
func (s *serve) dialBack(ctx context.Context, nonce string) {
	conn, err := s.link.dial(ctx, preamble.Preamble{Kind: preamble.Stream, Nonce: nonce})
	if err != nil {
		s.log.Warn("dial back", "err", err)
		return
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	hello, err := stream.ReadHello(conn)
	if !stop() || err != nil {
		return // the agent no longer wants it
	}
	if hello.Kind != "ssh" {
		s.log.Warn("stream of unknown kind refused", "kind", hello.Kind)
		return
	}
	if err := s.sessions.begin(ctx, conn.(*net.UnixConn)); err != nil {
		s.log.Warn("start session", "err", err)
	}
}
