package link_test

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/crypto/ssh"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/carrel-dev/carrel/agent"
	"github.com/carrel-dev/carrel/agent/config"
	"github.com/carrel-dev/carrel/agent/docker"
	"github.com/carrel-dev/carrel/agent/host"
	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/agent/v1/agentv1connect"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/proto/stream"
)

const image = "carrel/busybox:local"

// gateway is the side that agents dial: it checks proofs, and calls them back.
type gateway struct {
	carrelv1connect.UnimplementedHostServiceHandler
	t      *testing.T
	server *httptest.Server
	links  chan agentv1connect.HostServiceClient
	raw    chan net.Conn

	mu    sync.Mutex
	key   ed25519.PublicKey
	nonce []byte
	turns []*stream.Turned
}

func newGateway(t *testing.T) *gateway {
	t.Helper()
	g := &gateway{t: t, links: make(chan agentv1connect.HostServiceClient, 8), raw: make(chan net.Conn, 64)}
	mux := http.NewServeMux()
	mux.Handle(carrelv1connect.NewHostServiceHandler(g))
	mux.HandleFunc("GET /carrel/link", g.link)
	mux.HandleFunc("GET /carrel/stream", g.stream)
	g.server = httptest.NewTLSServer(mux)
	t.Cleanup(func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, turned := range g.turns {
			turned.Close()
		}
		g.server.Close()
	})
	return g
}

func (g *gateway) token() string {
	sum := sha256.Sum256(g.server.Certificate().Raw)
	raw, err := json.Marshal(map[string]string{"gateway": g.server.URL, "secret": "s3cret", "ca": base64.RawURLEncoding.EncodeToString(sum[:])})
	if err != nil {
		g.t.Fatal(err)
	}
	return "carrel-join." + base64.RawURLEncoding.EncodeToString(raw)
}

func (g *gateway) Join(_ context.Context, r *connect.Request[carrelv1.JoinRequest]) (*connect.Response[carrelv1.JoinResponse], error) {
	if r.Msg.GetToken() != "s3cret" {
		return nil, connect.NewError(connect.CodeUnauthenticated, fmt.Errorf("the join token is not known"))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.key = r.Msg.GetPublicKey()
	return connect.NewResponse(&carrelv1.JoinResponse{HostId: "h1", Name: r.Msg.GetName()}), nil
}

func (g *gateway) Challenge(context.Context, *connect.Request[carrelv1.ChallengeRequest]) (*connect.Response[carrelv1.ChallengeResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.nonce = make([]byte, 32)
	rand.Read(g.nonce)
	return connect.NewResponse(&carrelv1.ChallengeResponse{Nonce: g.nonce}), nil
}

func (g *gateway) link(w http.ResponseWriter, r *http.Request) {
	proof, _ := base64.StdEncoding.DecodeString(r.Header.Get("Carrel-Proof"))
	nonce, _ := base64.StdEncoding.DecodeString(r.Header.Get("Carrel-Nonce"))
	g.mu.Lock()
	ok := string(nonce) == string(g.nonce) && ed25519.Verify(g.key, append([]byte("carrel-link-v1\nh1\n"), nonce...), proof)
	g.mu.Unlock()
	if !ok || r.Header.Get("Carrel-Host") != "h1" || r.Header.Get("Carrel-Instance") == "" {
		http.Error(w, "no", http.StatusForbidden)
		return
	}
	w.Header().Set("Carrel-Stream-Token", "tok")
	conn, err := stream.Accept(w, r)
	if err != nil {
		return
	}
	turned, err := stream.NewTurnedTransport(conn, stream.TurnedOptions{})
	if err != nil {
		return
	}
	g.mu.Lock()
	g.turns = append(g.turns, turned)
	g.mu.Unlock()
	g.links <- agentv1connect.NewHostServiceClient(&http.Client{Transport: turned}, "http://agent", connect.WithGRPC())
}

func (g *gateway) stream(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Carrel-Stream-Token") != "tok" {
		http.Error(w, "no", http.StatusUnauthorized)
		return
	}
	if conn, err := stream.Accept(w, r); err == nil {
		g.raw <- conn
	}
}

// machine is one host for tests, with all of its own.
type machine struct {
	t         *testing.T
	gateway   *gateway
	config    config.Config
	workspace string
	engine    *docker.Client
	init      string
	stop      func()
	client    agentv1connect.HostServiceClient
	session   int64
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	name := "hosttest" + strings.ToLower(rand.Text()[:10])
	t.Setenv("CARREL_AGENT_DATA", filepath.Join(t.TempDir(), "data"))
	t.Setenv("CARREL_AGENT_ENGINE_NETWORK", name)
	t.Setenv("CARREL_AGENT_GPUS", "simulated:2x4090")
	c, err := config.Load("", os.Environ(), nil)
	if err != nil {
		t.Fatal(err)
	}
	engine, err := docker.New(docker.Options{Host: c.EngineHost, Network: name})
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, gateway: newGateway(t), config: c, workspace: name, engine: engine, init: filepath.Join(t.TempDir(), "carrel-init"), session: 1}
	build := exec.CommandContext(t.Context(), "go", "build", "-o", m.init, "github.com/carrel-dev/carrel/agent/cmd/carrel-init")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build carrel-init: %v\n%s", err, out)
	}
	t.Cleanup(m.sweep)
	if _, err := agent.Join(t.Context(), agent.JoinRequest{DataDir: c.DataDir, Token: m.gateway.token(), Name: "box", Version: "test"}); err != nil {
		t.Fatal(err)
	}
	return m
}

// sweep ends the agent and removes what it made in the engine.
func (m *machine) sweep() {
	if m.stop != nil {
		m.stop()
	}
	ctx := context.Background()
	list, err := m.engine.List(ctx)
	if err != nil {
		m.t.Error(err)
	}
	for _, c := range list {
		if strings.Contains(c.Name, m.workspace) {
			if err := m.engine.Remove(ctx, c.ID); err != nil {
				m.t.Error(err)
			}
		}
	}
	for _, args := range [][]string{{"volume", "rm", "carrel-" + m.workspace}, {"network", "rm", m.workspace}} {
		if out, err := exec.CommandContext(ctx, "docker", args...).CombinedOutput(); err != nil {
			m.t.Logf("docker %v: %s", args, out)
		}
	}
	m.engine.Close()
}

// start runs the agent and waits for its link.
func (m *machine) start() {
	m.t.Helper()
	id, err := agent.LoadIdentity(m.config.DataDir)
	if err != nil {
		m.t.Fatal(err)
	}
	a, err := agent.New(m.t.Context(), agent.Options{
		Config: m.config, Identity: id, Version: "test", InitFile: m.init,
		Log: slog.New(slog.NewTextHandler(m.t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo})),
	})
	if err != nil {
		m.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	m.stop = func() {
		cancel()
		if err := <-done; err != nil {
			m.t.Errorf("run: %v", err)
		}
		m.stop = nil
	}
	select {
	case m.client = <-m.gateway.links:
	case err := <-done:
		m.t.Fatalf("run ended: %v", err)
	case <-time.After(30 * time.Second):
		m.t.Fatal("no link")
	}
	m.session++
}

func (m *machine) apply(runs ...*agentv1.DesiredRun) {
	m.t.Helper()
	_, err := m.client.Apply(m.t.Context(), connect.NewRequest(&agentv1.ApplyRequest{
		Stamp: &agentv1.Stamp{DatabaseGeneration: 1, HostSession: m.session, Generation: time.Now().UnixNano()}, Runs: runs,
	}))
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) run(epoch int64, digest string) *agentv1.DesiredRun {
	m.t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		m.t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(key, "")
	if err != nil {
		m.t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		m.t.Fatal(err)
	}
	cert := &ssh.Certificate{
		Key: signer.PublicKey(), CertType: ssh.HostCert, ValidPrincipals: []string{"demo"}, ValidBefore: ssh.CertTimeInfinity,
	}
	if err := cert.SignCert(rand.Reader, signer); err != nil {
		m.t.Fatal(err)
	}
	return &agentv1.DesiredRun{
		Workspace: m.workspace, Epoch: epoch, Desired: agentv1.DesiredState_DESIRED_STATE_RUNNING, Name: "demo", Owner: "ana",
		ImageReference: image, ImageDigest: digest, Identity: &agentv1.Identity{Login: "ana", Uid: 54321, Gid: 54321},
		CpuMillis: 500, MemoryMib: 256, ShmMib: 64, PidsLimit: 256, Project: "default", Pool: "default", StopGrace: durationpb.New(5 * time.Second),
		Mounts: []*agentv1.Mount{{Kind: agentv1.MountKind_MOUNT_KIND_LOCAL, VolumeId: m.workspace, Target: "/home/ana", Home: true, Name: "demo-home"}},
		Ssh: &agentv1.SshIdentity{
			HostKey: pem.EncodeToMemory(block), HostCertificate: string(ssh.MarshalAuthorizedKey(cert)),
			AuthorizedKeys: []string{string(ssh.MarshalAuthorizedKey(signer.PublicKey()))},
		},
	}
}

// within follows Observe until a run is in a phase.
func (m *machine) within(limit time.Duration, epoch int64, phase agentv1.RunPhase) (*agentv1.ObservedRun, *agentv1.HostFacts) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), limit)
	defer cancel()
	var facts *agentv1.HostFacts
	var last *agentv1.ObservedRun
	for ctx.Err() == nil {
		s, err := m.client.Observe(ctx, connect.NewRequest(&agentv1.ObserveRequest{}))
		if err != nil {
			m.t.Fatal(err)
		}
		for s.Receive() {
			if s.Msg().GetFacts() != nil {
				facts = s.Msg().GetFacts()
			}
			for _, r := range s.Msg().GetRuns() {
				if r.GetEpoch() == epoch {
					last = r
				}
			}
			if last.GetPhase() == phase {
				s.Close()
				return last, facts
			}
		}
		s.Close()
	}
	m.t.Fatalf("not %s within %s: %v", phase, limit, last)
	return nil, nil
}

// banner opens a byte stream to the run's SSH server.
func (m *machine) banner(epoch int64) string {
	m.t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		select {
		case conn := <-m.gateway.raw:
			line, err := hello(conn, m.workspace, epoch)
			conn.Close()
			if err == nil {
				return line
			}
		case <-deadline:
			m.t.Fatal("no stream works")
		}
	}
}

func hello(conn net.Conn, workspace string, epoch int64) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return "", err
	}
	if err := stream.WriteHello(conn, stream.Hello{Workspace: workspace, Epoch: epoch, Kind: "ssh"}); err != nil {
		return "", err
	}
	return bufio.NewReader(conn).ReadString('\n')
}

// The main path on real parts: join, link, a workspace with an SSH server, the agent's death, adoption, stop.
func TestREL01MainPath(t *testing.T) {
	m := newMachine(t)
	m.start()
	resolved, err := m.client.ResolveImage(t.Context(), connect.NewRequest(&agentv1.ResolveImageRequest{Reference: image}))
	if err != nil || !resolved.Msg.GetLocalOnly() || !resolved.Msg.GetPresent() {
		t.Fatalf("resolve: %v, %v", resolved, err)
	}
	run := m.run(1, resolved.Msg.GetDigest())
	begin := time.Now()
	m.apply(run)
	ready, facts := m.within(time.Minute, 1, agentv1.RunPhase_RUN_PHASE_READY)
	t.Logf("ready after %s", time.Since(begin))
	if facts.GetGpuSource() != "simulated" || len(facts.GetDevices()) != 2 || facts.GetEngineVersion() == "" || facts.GetMemoryMib() < 100 {
		t.Errorf("facts: %v", facts)
	}
	if line := m.banner(1); !strings.HasPrefix(line, "SSH-2.0-") {
		t.Errorf("banner %q", line)
	}
	sample, err := m.client.Sample(t.Context(), connect.NewRequest(&agentv1.SampleRequest{}))
	if err != nil || len(sample.Msg.GetDevices()) != 2 || len(sample.Msg.GetRuns()) != 1 || sample.Msg.GetRuns()[0].GetMemoryBytes() == 0 {
		t.Errorf("sample: %v, %v", sample, err)
	}

	m.stop()
	m.start()
	m.apply(run)
	begin = time.Now()
	adopted, _ := m.within(10*time.Second, 1, agentv1.RunPhase_RUN_PHASE_READY)
	if adopted.GetContainerId() != ready.GetContainerId() || adopted.GetStartedAge().AsDuration() < time.Since(begin) {
		t.Errorf("adopted %v, was %v", adopted, ready)
	}
	if line := m.banner(1); !strings.HasPrefix(line, "SSH-2.0-") {
		t.Errorf("banner after the restart: %q", line)
	}

	run.Desired, run.Reason = agentv1.DesiredState_DESIRED_STATE_GONE, "stopped by ana"
	m.apply(run)
	gone, _ := m.within(30*time.Second, 1, agentv1.RunPhase_RUN_PHASE_GONE)
	if gone.GetReasonCode() != "stopped" || gone.GetEndedAge() == nil || gone.GetEndedUnattested() {
		t.Errorf("gone: %v", gone)
	}
	if _, err := m.engine.Inspect(t.Context(), gone.GetContainerId()); host.KindOf(err) != host.KindNotFound {
		t.Errorf("container: %v", err)
	}
}

// REL-05, REL-02, ACCT-12 on the real engine: removed and killed from outside, with the agent up and down.
func TestREL02RealEngine(t *testing.T) {
	m := newMachine(t)
	m.start()
	resolved, err := m.client.ResolveImage(t.Context(), connect.NewRequest(&agentv1.ResolveImageRequest{Reference: image}))
	if err != nil {
		t.Fatal(err)
	}
	digest := resolved.Msg.GetDigest()
	for epoch, act := range map[int64][]string{1: {"rm", "-f"}, 2: {"kill"}} {
		run := m.run(epoch, digest)
		m.apply(run)
		r, _ := m.within(time.Minute, epoch, agentv1.RunPhase_RUN_PHASE_READY)
		if out, err := exec.CommandContext(t.Context(), "docker", append(act, r.GetContainerId())...).CombinedOutput(); err != nil {
			t.Fatalf("%s", out)
		}
		gone, _ := m.within(5*time.Second, epoch, agentv1.RunPhase_RUN_PHASE_GONE)
		if gone.GetEndedUnattested() || gone.GetExitCode() != 137 || gone.GetEndedAge().AsDuration() > 5*time.Second {
			t.Errorf("%v: %v", act, gone)
		}
	}
	run := m.run(3, digest)
	m.apply(run)
	r, _ := m.within(time.Minute, 3, agentv1.RunPhase_RUN_PHASE_READY)
	m.stop()
	if out, err := exec.CommandContext(t.Context(), "docker", "kill", r.GetContainerId()).CombinedOutput(); err != nil {
		t.Fatalf("%s", out)
	}
	killed := time.Now()
	time.Sleep(2 * time.Second) //nolint:forbidigo // down for a measurable while
	m.start()
	m.apply(run)
	gone, _ := m.within(10*time.Second, 3, agentv1.RunPhase_RUN_PHASE_GONE)
	if gone.GetReasonCode() != host.ReasonKilled || gone.GetEndedUnattested() ||
		(gone.GetEndedAge().AsDuration()-time.Since(killed)).Abs() > 1500*time.Millisecond {
		t.Errorf("killed %s ago: %v", time.Since(killed), gone)
	}
}

// An agent joins the gateway of its token and no other.
func TestJoinPinsTheCA(t *testing.T) {
	g := newGateway(t)
	other := httptest.NewUnstartedServer(http.NotFoundHandler())
	other.TLS = &tls.Config{Certificates: []tls.Certificate{selfSigned(t)}}
	other.StartTLS()
	defer other.Close()
	sum := sha256.Sum256(g.server.Certificate().Raw)
	raw, err := json.Marshal(map[string]string{"gateway": other.URL, "secret": "s3cret", "ca": base64.RawURLEncoding.EncodeToString(sum[:])})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for token, want := range map[string]string{
		"carrel-join." + base64.RawURLEncoding.EncodeToString(raw): "another CA",
		"nonsense":                       "not a join token",
		"carrel-join.AAAA":               "not whole",
		plainToken(t, "http://10.0.0.1"): "plain HTTP",
	} {
		_, err := agent.Join(t.Context(), agent.JoinRequest{DataDir: dir, Token: token, Name: "box"})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	before, err := agent.LoadIdentity(dir)
	if err != nil || before.HostID != "" {
		t.Fatalf("%+v, %v", before.HostID, err)
	}
	after, err := agent.Join(t.Context(), agent.JoinRequest{DataDir: dir, Token: g.token(), Name: "box"})
	if err != nil || after.HostID != "h1" || !after.Key.Equal(before.Key) || len(after.CA) == 0 {
		t.Fatalf("joined: %+v, %v", after.HostID, err)
	}
	file := filepath.Join(dir, "identity.json")
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if err := os.Chmod(file, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := agent.LoadIdentity(dir); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("readable by others: %v", err)
	}
}

func plainToken(t *testing.T, gateway string) string {
	t.Helper()
	raw, err := json.Marshal(map[string]string{"gateway": gateway, "secret": "s"})
	if err != nil {
		t.Fatal(err)
	}
	return "carrel-join." + base64.RawURLEncoding.EncodeToString(raw)
}

func selfSigned(t *testing.T) tls.Certificate {
	t.Helper()
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(7), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
