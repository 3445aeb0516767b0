package gateway_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/agent/v1/agentv1connect"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/proto/stream"
	"github.com/carrel-dev/carrel/services/auth"
)

// anyImage is a reference that the fake host resolves.
const anyImage = "registry.test/base:1"

// fakeHost is an agent without an engine: what should run is ready at once, byte streams are echoed.
type fakeHost struct {
	agentv1connect.UnimplementedHostServiceHandler

	t      *testing.T
	r      *rig
	id     string
	key    ed25519.PrivateKey
	ctx    context.Context
	work   sync.WaitGroup
	token  string // of byte streams
	opened chan stream.Hello

	mu      sync.Mutex
	seq     int64
	runs    map[string]*fakeRun
	stamp   *agentv1.Stamp
	changed chan struct{}
}

type fakeRun struct {
	seq   int64
	state *agentv1.ObservedRun
}

// join makes a host with a join token, connects it and waits until the gateway counts it as ready.
func (r *rig) join(name string) *fakeHost {
	r.t.Helper()
	h := r.joined(name)
	h.connect(time.Now().UnixNano())
	hosts := carrelv1connect.NewHostServiceClient(r.http, r.url)
	until(r.t, "host "+name+" is ready", func() bool {
		res, err := hosts.List(r.t.Context(), with(r.admin, &carrelv1.HostServiceListRequest{}))
		if err != nil {
			r.t.Fatal(err)
		}
		for _, host := range res.Msg.GetHosts() {
			if host.GetName() == name && host.GetState() == "ready" && host.GetCpus() > 0 {
				return true
			}
		}
		return false
	})
	return h
}

// joined makes a host that is not connected.
func (r *rig) joined(name string) *fakeHost {
	r.t.Helper()
	hosts := carrelv1connect.NewHostServiceClient(r.http, r.url)
	token, err := hosts.CreateJoinToken(r.t.Context(), with(r.admin, &carrelv1.CreateJoinTokenRequest{}))
	if err != nil {
		r.t.Fatal(err)
	}
	grant, err := auth.ParseJoinToken(token.Msg.GetToken())
	if err != nil {
		r.t.Fatal(err)
	}
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		r.t.Fatal(err)
	}
	res, err := hosts.Join(r.t.Context(), connect.NewRequest(&carrelv1.JoinRequest{Token: grant.Secret, Name: name, PublicKey: public, Version: "test"}))
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	h := &fakeHost{
		t: r.t, r: r, id: res.Msg.GetHostId(), key: private, ctx: ctx, opened: make(chan stream.Hello, 100),
		runs: map[string]*fakeRun{}, changed: make(chan struct{}),
	}
	r.t.Cleanup(func() {
		cancel()
		h.work.Wait()
	})
	return h
}

// proof returns the headers of a link for a fresh nonce.
func (h *fakeHost) proof(started int64) http.Header {
	h.t.Helper()
	res, err := carrelv1connect.NewHostServiceClient(h.r.http, h.r.url).Challenge(h.t.Context(), connect.NewRequest(&carrelv1.ChallengeRequest{HostId: h.id}))
	if err != nil {
		h.t.Fatal(err)
	}
	return h.headers(h.id, res.Msg.GetNonce(), ed25519.Sign(h.key, auth.Proof(h.id, res.Msg.GetNonce())), started)
}

func (h *fakeHost) headers(id string, nonce, proof []byte, started int64) http.Header {
	header := http.Header{}
	header.Set("Carrel-Host", id)
	header.Set("Carrel-Nonce", base64.StdEncoding.EncodeToString(nonce))
	header.Set("Carrel-Proof", base64.StdEncoding.EncodeToString(proof))
	header.Set("Carrel-Instance", strconv.FormatInt(started, 10))
	return header
}

func (h *fakeHost) dial(path string, header http.Header) (net.Conn, http.Header, error) {
	return dial(h.ctx, h.r, path, header)
}

// dial opens an upgraded connection to the gateway.
func dial(ctx context.Context, r *rig, path string, header http.Header) (net.Conn, http.Header, error) {
	o := stream.Options{URL: r.url + path, Header: header, Timeout: patience}
	if pem := r.g.CAPEM(); pem != nil {
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(pem)
		o.TLS = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	}
	return stream.Dial(ctx, o)
}

// connect brings the link up and keeps it until the test or the gateway ends it; the channel is closed then.
func (h *fakeHost) connect(started int64) (ended <-chan struct{}) {
	h.t.Helper()
	conn, answer, err := h.dial("/carrel/link", h.proof(started))
	if err != nil {
		h.t.Fatalf("link: %v", err)
	}
	h.token = answer.Get("Carrel-Stream-Token")
	mux := http.NewServeMux()
	mux.Handle(agentv1connect.NewHostServiceHandler(h))
	over := make(chan struct{})
	h.work.Go(func() {
		defer close(over)
		_ = stream.ServeTurned(h.ctx, conn, mux, stream.TurnedOptions{}) // it ends with the test or the gateway
		_ = conn.Close()
	})
	for range 4 {
		h.offer()
	}
	return over
}

// offer dials one byte stream and echoes it once it is used.
func (h *fakeHost) offer() {
	token := h.token
	h.work.Go(func() {
		conn, _, err := h.dial("/carrel/stream", http.Header{"Carrel-Host": {h.id}, "Carrel-Stream-Token": {token}})
		if err != nil {
			return // the gateway has enough of them, or has ended
		}
		defer conn.Close()
		stop := context.AfterFunc(h.ctx, func() { _ = conn.Close() })
		defer stop()
		hello, err := stream.ReadHello(conn)
		if err != nil {
			return
		}
		h.opened <- hello
		if tcp, ok := conn.(*net.TCPConn); ok {
			_, _ = io.Copy(struct{ io.Writer }{tcp}, struct{ io.Reader }{tcp})
			return
		}
		_, _ = io.Copy(conn, conn)
	})
}

func (h *fakeHost) DialBack(_ context.Context, req *connect.Request[agentv1.DialBackRequest]) (*connect.Response[agentv1.DialBackResponse], error) {
	for range req.Msg.GetCount() {
		h.offer()
	}
	return connect.NewResponse(&agentv1.DialBackResponse{}), nil
}

func (h *fakeHost) Apply(_ context.Context, req *connect.Request[agentv1.ApplyRequest]) (*connect.Response[agentv1.ApplyResponse], error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stamp = req.Msg.GetStamp()
	for _, want := range req.Msg.GetRuns() {
		key := fmt.Sprint(want.GetWorkspace(), "/", want.GetEpoch())
		phase := agentv1.RunPhase_RUN_PHASE_READY
		if want.GetDesired() == agentv1.DesiredState_DESIRED_STATE_GONE {
			phase = agentv1.RunPhase_RUN_PHASE_GONE
		}
		if have := h.runs[key]; have != nil && have.state.GetPhase() == phase {
			continue
		}
		h.seq++
		state := &agentv1.ObservedRun{
			Workspace: want.GetWorkspace(), Epoch: want.GetEpoch(), Phase: phase, ContainerId: "c-" + key, ImageDigest: want.GetImageDigest(),
			StartedAge: durationpb.New(0), ReadyAge: durationpb.New(0), Sudo: "yes",
		}
		if phase == agentv1.RunPhase_RUN_PHASE_GONE {
			state.EndedAge = durationpb.New(0)
		}
		h.runs[key] = &fakeRun{seq: h.seq, state: state}
	}
	close(h.changed)
	h.changed = make(chan struct{})
	return connect.NewResponse(&agentv1.ApplyResponse{Stamp: h.stamp}), nil
}

func (h *fakeHost) Observe(ctx context.Context, req *connect.Request[agentv1.ObserveRequest], out *connect.ServerStream[agentv1.ObserveResponse]) error {
	ctx, cancel := context.WithTimeout(ctx, min(req.Msg.GetMaxWait().AsDuration(), 10*time.Second))
	defer cancel()
	after, first := req.Msg.GetAfterSeq(), true
	for {
		h.mu.Lock()
		batch := &agentv1.ObserveResponse{Seq: max(h.seq, after), JournalId: "fake", Complete: first}
		for _, run := range h.runs {
			if run.seq > after {
				batch.Runs = append(batch.Runs, run.state)
			}
		}
		changed := h.changed
		h.mu.Unlock()
		if first {
			batch.Facts = &agentv1.HostFacts{
				BootId: "boot", AgentVersion: "test", EngineVersion: "test", Os: "test", Cpus: 64, MemoryMib: 256 << 10, DiskFreeMib: 1 << 20, GpuSource: "none",
			}
		}
		if first || len(batch.GetRuns()) > 0 {
			if err := out.Send(batch); err != nil {
				return err
			}
		}
		after, first = batch.GetSeq(), false
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

func (h *fakeHost) Sample(context.Context, *connect.Request[agentv1.SampleRequest]) (*connect.Response[agentv1.SampleResponse], error) {
	return connect.NewResponse(&agentv1.SampleResponse{}), nil
}

func (h *fakeHost) ResolveImage(context.Context, *connect.Request[agentv1.ResolveImageRequest]) (*connect.Response[agentv1.ResolveImageResponse], error) {
	return connect.NewResponse(&agentv1.ResolveImageResponse{Digest: "sha256:" + fmt.Sprintf("%064x", 7), Present: true, SizeBytes: 1}), nil
}

// create makes a workspace without devices; it runs unless it is to be stopped.
func (r *rig) create(token, name string, stopped bool) *carrelv1.Workspace {
	r.t.Helper()
	res, err := r.workspaces().Create(r.t.Context(), with(token, &carrelv1.CreateRequest{
		RequestId: "make-" + name, Name: name, Stopped: stopped, Spec: &carrelv1.WorkspaceSpec{Image: anyImage, Gpu: &carrelv1.GpuRequest{Count: 0}},
	}))
	if err != nil {
		r.t.Fatalf("create %s: %v", name, err)
	}
	if stopped {
		return res.Msg.GetWorkspace()
	}
	return r.await(token, name, carrelv1.WorkspaceState_WORKSPACE_STATE_RUNNING)
}

// await follows a workspace's Watch stream until it is in a state.
func (r *rig) await(token, name string, state carrelv1.WorkspaceState) *carrelv1.Workspace {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	watch, err := r.workspaces().Watch(ctx, with(token, &carrelv1.WatchRequest{Workspace: name}))
	if err != nil {
		r.t.Fatal(err)
	}
	defer watch.Close()
	var last *carrelv1.Workspace
	for watch.Receive() {
		if w := watch.Msg().GetWorkspace(); w != nil {
			if last = w; w.GetState() == state {
				return w
			}
		}
	}
	r.t.Fatalf("%s did not become %s: %v, last %v", name, state, watch.Err(), last)
	return nil
}
