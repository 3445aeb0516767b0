package initd

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/crypto/ssh"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/carrel-dev/carrel/agent/initd/account"
	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
)

// maxDialBacks is how many connections one call may ask for.
const maxDialBacks = 16

// service answers the agent's calls. One at a time changes the configuration.
type service struct {
	serve   *serve
	streams context.Context // of the dialled-back connections, which outlive the call that asked for them
	mu      sync.Mutex
}

// Configure makes the container what the agent says: account, home, sudo rule; then tells live sessions the new keys.
func (s *service) Configure(_ context.Context, req *connect.Request[agentv1.ConfigureRequest]) (
	*connect.Response[agentv1.ConfigureResponse], error,
) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cfg, err := parseConfiguration(req.Msg)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if err := s.serve.host.accepts(cfg.version); err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	found, err := account.Apply("/", account.Request{User: cfg.user, Sudo: cfg.sudo})
	if err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	s.serve.sessions.setKeys(cfg.keys, func() { s.serve.host.set(cfg) })
	return connect.NewResponse(&agentv1.ConfigureResponse{InitVersion: Version, Sudo: found.Sudo, Shell: found.Shell}), nil
}

func parseConfiguration(m *agentv1.ConfigureRequest) (*configuration, error) {
	id := m.GetIdentity()
	cfg := &configuration{
		version: m.GetVersion(), sudo: m.GetSudo(), env: m.GetEnv(),
		user: account.User{Login: id.GetLogin(), UID: int(id.GetUid()), GID: int(id.GetGid()), Home: m.GetHome()},
	}
	for _, g := range id.GetGroups() {
		cfg.user.Groups = append(cfg.user.Groups, account.Group{Name: g.GetName(), GID: int(g.GetGid())})
	}
	for name, value := range cfg.env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
			return nil, fmt.Errorf("environment variable %q: a name has no = and neither part a NUL", name)
		}
	}
	var err error
	if cfg.signer, err = ssh.ParsePrivateKey(m.GetSsh().GetHostKey()); err != nil {
		return nil, fmt.Errorf("host key: %w", err)
	}
	if cfg.cert, err = parseCertificate(m.GetSsh().GetHostCertificate()); err != nil {
		return nil, err
	}
	for _, line := range m.GetSsh().GetAuthorizedKeys() {
		key, _, options, _, err := ssh.ParseAuthorizedKey([]byte(line))
		if err != nil {
			return nil, fmt.Errorf("authorized key: %w", err)
		}
		if len(options) > 0 {
			return nil, fmt.Errorf("authorized key with options %v: options are not supported", options)
		}
		cfg.keys = append(cfg.keys, key)
	}
	return cfg, nil
}

func parseCertificate(line string) (*ssh.Certificate, error) {
	if line == "" {
		return nil, nil
	}
	key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(line))
	if err != nil {
		return nil, fmt.Errorf("host certificate: %w", err)
	}
	cert, ok := key.(*ssh.Certificate)
	if !ok || cert.CertType != ssh.HostCert {
		return nil, fmt.Errorf("host certificate: %s is no host certificate", key.Type())
	}
	return cert, nil
}

// DialBack opens connections on which the agent will say what it wants.
func (s *service) DialBack(_ context.Context, req *connect.Request[agentv1.WorkspaceServiceDialBackRequest]) (
	*connect.Response[agentv1.WorkspaceServiceDialBackResponse], error,
) {
	n := req.Msg.GetCount()
	if n < 1 || n > maxDialBacks {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("count %d: ask for 1 to %d", n, maxDialBacks))
	}
	for range n {
		s.serve.streams.Go(func() { s.serve.dialBack(s.streams, req.Msg.GetNonce()) })
	}
	return connect.NewResponse(&agentv1.WorkspaceServiceDialBackResponse{}), nil
}

// Stop tells the sessions why, and then, once the answer is on its way, has everything inside ended.
func (s *service) Stop(ctx context.Context, req *connect.Request[agentv1.StopRequest]) (*connect.Response[agentv1.StopResponse], error) {
	grace := DefaultGrace
	if d := req.Msg.GetGrace(); d != nil {
		grace = max(d.AsDuration(), 0)
	}
	s.serve.host.setStopReason(req.Msg.GetReason())
	s.serve.sessions.stop(s.serve.host.stopReason(), stopWait)
	context.AfterFunc(ctx, func() {
		if err := s.serve.orderStop(grace); err != nil {
			s.serve.log.Error("order the stop", "err", err)
		}
	})
	return connect.NewResponse(&agentv1.StopResponse{}), nil
}

// Activity counts what goes on.
func (s *service) Activity(context.Context, *connect.Request[agentv1.ActivityRequest]) (
	*connect.Response[agentv1.ActivityResponse], error,
) {
	count, typed := s.serve.sessions.activity()
	out := &agentv1.ActivityResponse{SshSessions: int32(count)}
	if !typed.IsZero() {
		out.TypedAgo = durationpb.New(time.Since(typed))
	}
	return connect.NewResponse(out), nil
}
