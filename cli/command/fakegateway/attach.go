package fakegateway

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/crypto/ssh"
	"google.golang.org/protobuf/types/known/timestamppb"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/proto/stream"
)

type attachService struct {
	carrelv1connect.UnimplementedAttachServiceHandler
	g *Gateway
}

func (s *attachService) CreateTicket(ctx context.Context, req *connect.Request[carrelv1.CreateTicketRequest]) (*connect.Response[carrelv1.CreateTicketResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	w, err := s.g.findLocked(userOf(ctx), req.Msg.GetWorkspace())
	if err != nil {
		return nil, err
	}
	if w.GetState() != carrelv1.WorkspaceState_WORKSPACE_STATE_RUNNING {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errText(w.GetName()+" is not running; start it with `carrel start "+w.GetName()+"`"))
	}
	ticket := random()
	s.g.tickets[ticket] = w.GetId()
	return connect.NewResponse(&carrelv1.CreateTicketResponse{Ticket: ticket, ExpiresAt: timestamppb.New(time.Now().Add(30 * time.Second))}), nil
}

func (s *attachService) SshConfig(ctx context.Context, _ *connect.Request[carrelv1.SshConfigRequest]) (*connect.Response[carrelv1.SshConfigResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	resp := &carrelv1.SshConfigResponse{Deployment: Deployment, HostCaKeys: []string{strings.TrimSpace(string(ssh.MarshalAuthorizedKey(s.g.ssh.ca.PublicKey())))}}
	for _, w := range s.g.listLocked(userOf(ctx), false) {
		resp.Hosts = append(resp.Hosts, &carrelv1.SshHost{WorkspaceId: w.GetId(), Workspace: w.GetName(), Login: w.GetLogin(), Principal: w.GetSshPrincipal()})
	}
	return connect.NewResponse(resp), nil
}

func (g *Gateway) attach(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	id, ok := g.tickets[r.Header.Get("Carrel-Ticket")]
	delete(g.tickets, r.Header.Get("Carrel-Ticket"))
	var principal, owner string
	for _, ws := range g.workspaces {
		if ws.GetId() == id {
			principal, owner = ws.GetSshPrincipal(), ws.GetOwner()
		}
	}
	g.mu.Unlock()
	if !ok {
		http.Error(w, "this ticket is used up or expired; connect again", http.StatusForbidden)
		return
	}
	conn, err := stream.Accept(w, r)
	if err != nil {
		return
	}
	g.ssh.serve(conn, principal, g.Keys(owner))
}

// sshServer is a workspace's SSH server: exec by /bin/sh on this machine, no shell, no forwards.
type sshServer struct {
	ca   ssh.Signer
	host ssh.Signer
	wg   sync.WaitGroup
}

func newSSHServer(t testing.TB) *sshServer {
	s := &sshServer{ca: newSigner(t), host: newSigner(t)}
	t.Cleanup(s.wg.Wait)
	return s
}

func newSigner(t testing.TB) ssh.Signer {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return signer
}

// serve speaks SSH as the workspace of a principal to whoever has one of keys.
func (s *sshServer) serve(conn net.Conn, principal string, keys []string) {
	cert := &ssh.Certificate{
		Key: s.host.PublicKey(), CertType: ssh.HostCert, KeyId: principal, ValidPrincipals: []string{principal},
		ValidAfter: uint64(time.Now().Add(-48 * time.Hour).Unix()), ValidBefore: uint64(time.Now().Add(time.Hour).Unix()),
	}
	if err := cert.SignCert(rand.Reader, s.ca); err != nil {
		_ = conn.Close()
		return
	}
	signer, err := ssh.NewCertSigner(cert, s.host)
	if err != nil {
		_ = conn.Close()
		return
	}
	cfg := &ssh.ServerConfig{PublicKeyCallback: func(_ ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
		for _, line := range keys {
			known, _, _, _, err := ssh.ParseAuthorizedKey([]byte(line))
			if err == nil && bytes.Equal(known.Marshal(), key.Marshal()) {
				return nil, nil
			}
		}
		return nil, errors.New("unknown key")
	}}
	cfg.AddHostKey(signer)
	s.wg.Go(func() {
		defer func() { _ = conn.Close() }()
		c, channels, requests, err := ssh.NewServerConn(conn, cfg)
		if err != nil {
			return
		}
		go ssh.DiscardRequests(requests)
		for ch := range channels {
			if ch.ChannelType() != "session" {
				_ = ch.Reject(ssh.UnknownChannelType, "no")
				continue
			}
			session, reqs, err := ch.Accept()
			if err != nil {
				return
			}
			s.wg.Go(func() { serveSession(session, reqs) })
		}
		_ = c.Wait()
	})
}

func serveSession(ch ssh.Channel, reqs <-chan *ssh.Request) {
	defer func() { _ = ch.Close() }()
	for r := range reqs {
		if r.Type != "exec" || len(r.Payload) < 4 {
			_ = r.Reply(r.Type == "env", nil)
			continue
		}
		_ = r.Reply(true, nil)
		status := runShell(ch, string(r.Payload[4:4+binary.BigEndian.Uint32(r.Payload)]))
		_, _ = ch.SendRequest("exit-status", false, binary.BigEndian.AppendUint32(nil, uint32(status)))
		return
	}
}

func runShell(ch ssh.Channel, line string) int {
	cmd := exec.Command("/bin/sh", "-c", line)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.Stdout, cmd.Stderr = ch, ch.Stderr()
	in, err := cmd.StdinPipe()
	if err != nil {
		return 255
	}
	if err := cmd.Start(); err != nil {
		return 255
	}
	go func() {
		_, _ = io.Copy(in, ch)
		_ = in.Close()
	}()
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	return 0
}
