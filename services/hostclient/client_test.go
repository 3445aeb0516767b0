package hostclient

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/agent/v1/agentv1connect"
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/lifecycle"
)

var (
	_ lifecycle.Hosts = (*Client)(nil)
	_ Identities      = (*lifecycle.Identities)(nil)
)

var now = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// agent is the other side; what it does is each test's affair.
type agent struct {
	agentv1connect.UnimplementedHostServiceHandler
	apply   func(*agentv1.ApplyRequest) error
	observe func(ctx context.Context, r *agentv1.ObserveRequest, s *connect.ServerStream[agentv1.ObserveResponse]) error
	sample  *agentv1.SampleResponse
	resolve func(string) (*agentv1.ResolveImageResponse, error)
}

func (a *agent) Apply(_ context.Context, r *connect.Request[agentv1.ApplyRequest]) (*connect.Response[agentv1.ApplyResponse], error) {
	return connect.NewResponse(&agentv1.ApplyResponse{}), a.apply(r.Msg)
}

func (a *agent) Observe(ctx context.Context, r *connect.Request[agentv1.ObserveRequest], s *connect.ServerStream[agentv1.ObserveResponse]) error {
	return a.observe(ctx, r.Msg, s)
}

func (a *agent) Sample(context.Context, *connect.Request[agentv1.SampleRequest]) (*connect.Response[agentv1.SampleResponse], error) {
	return connect.NewResponse(a.sample), nil
}

func (a *agent) ResolveImage(_ context.Context, r *connect.Request[agentv1.ResolveImageRequest]) (*connect.Response[agentv1.ResolveImageResponse], error) {
	m, err := a.resolve(r.Msg.GetReference())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(m), nil
}

// links leads every call to one server, or nowhere.
type links struct{ client *http.Client }

func (l links) Client(string) (*http.Client, error) {
	if l.client == nil {
		return nil, errors.New("host is not connected")
	}
	return l.client, nil
}

type redirect struct {
	to   string
	base http.RoundTripper
}

func (r redirect) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	request.URL.Host = r.to
	return r.base.RoundTrip(request)
}

type identities struct{ err error }

func (i identities) SSHIdentity(w fleet.Workspace) ([]byte, string, error) {
	return []byte("key of " + w.ID), "certificate of " + w.SSHPrincipal(), i.err
}

// dial serves an agent over unencrypted HTTP/2, as on a turned link.
func dial(t *testing.T, a *agent, settings Settings) *Client {
	t.Helper()
	_, handler := agentv1connect.NewHostServiceHandler(a)
	server := httptest.NewUnstartedServer(handler)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		server.Close()
	})
	client := &http.Client{Transport: redirect{server.Listener.Addr().String(), transport}}
	return New(links{client}, identities{}, func() time.Time { return now }, settings)
}

func TestApplyTellsEverythingOfARunAndNoSecretOfAnEndedOne(t *testing.T) {
	var got *agentv1.ApplyRequest
	c := dial(t, &agent{apply: func(r *agentv1.ApplyRequest) error { got = r; return nil }}, Settings{Deployment: "lab"})
	w := fleet.Workspace{ID: "w1", Name: "fraud", Project: "vision", Spec: fleet.Spec{Pool: "default", Image: "debian", Env: map[string]string{"A": "1"}}}
	owner := fleet.User{Name: "ana", Login: "ana", UID: 10001, GID: 10001, Groups: []fleet.Group{{Name: "gpu", GID: 44}}}
	err := c.Apply(t.Context(), fleet.DesiredHost{
		Host: "h1", Stamp: fleet.Stamp{DatabaseGeneration: 1, HostSession: 2, Generation: 3},
		Runs: []fleet.DesiredRun{{
			Run: fleet.Run{
				Key: fleet.RunKey{Workspace: "w1", Epoch: 4}, Goal: fleet.GoalRunning, ImageDigest: "sha256:d", CPUMillis: 2000, MemoryMiB: 4096, ShmMiB: 2048, PidsLimit: 4096,
				Devices: []fleet.DeviceID{"SIM-1", "GPU-2"}, StopGrace: 10 * time.Second,
			},
			Workspace: w, Owner: owner, PoolSudo: true, Simulated: map[fleet.DeviceID]bool{"SIM-1": true},
			Keys:   []fleet.DeviceKey{{PublicKey: "ssh-ed25519 AAAA"}},
			Mounts: []fleet.Mount{{Name: "data", HostPath: "/data", Target: "/data", ReadOnly: true, Public: true}, {Name: "fraud-home", Volume: "v1", Target: "/home/ana", Home: true}},
		}, {Run: fleet.Run{Key: fleet.RunKey{Workspace: "w1", Epoch: 3}, Goal: fleet.GoalStopped, GoalReason: "stopped by ana"}, Workspace: w, Owner: owner}},
		VolumesGone: []fleet.VolumeID{"v9"}, Excluded: []fleet.DeviceID{"GPU-3"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := &agentv1.ApplyRequest{
		Stamp: &agentv1.Stamp{DatabaseGeneration: 1, HostSession: 2, Generation: 3}, Deployment: "lab", VolumesGone: []string{"v9"}, ExcludedDevices: []string{"GPU-3"},
		Runs: []*agentv1.DesiredRun{{
			Workspace: "w1", Epoch: 4, Desired: agentv1.DesiredState_DESIRED_STATE_RUNNING, Name: "fraud", Owner: "ana", ImageReference: "debian", ImageDigest: "sha256:d",
			Identity:  &agentv1.Identity{Login: "ana", Uid: 10001, Gid: 10001, Groups: []*agentv1.Group{{Name: "gpu", Gid: 44}}},
			CpuMillis: 2000, MemoryMib: 4096, ShmMib: 2048, PidsLimit: 4096, Devices: []*agentv1.DeviceGrant{{Id: "SIM-1", Simulated: true}, {Id: "GPU-2"}},
			Mounts: []*agentv1.Mount{
				{Kind: agentv1.MountKind_MOUNT_KIND_LOCAL, VolumeId: "v1", Target: "/home/ana", Home: true, Name: "fraud-home"},
				{Kind: agentv1.MountKind_MOUNT_KIND_DECLARED, HostPath: "/data", Target: "/data", ReadOnly: true, Name: "data", Public: true},
			},
			Env: map[string]string{"A": "1"}, Sudo: true, StopGrace: durationpb.New(10 * time.Second), Project: "vision", Pool: "default",
			Ssh: &agentv1.SshIdentity{HostKey: []byte("key of w1"), HostCertificate: "certificate of fraud.carrel.w1", AuthorizedKeys: []string{"ssh-ed25519 AAAA"}},
		}, {
			Workspace: "w1", Epoch: 3, Desired: agentv1.DesiredState_DESIRED_STATE_GONE, Name: "fraud", Owner: "ana", StopGrace: durationpb.New(0),
			Reason: "stopped by ana", Project: "vision", Pool: "default",
		}},
	}
	if !proto.Equal(got, want) {
		t.Errorf("\n got %v\nwant %v", got, want)
	}
}

func TestObservePutsAgesOntoOurTimeLine(t *testing.T) {
	exit := int32(3)
	c := dial(t, &agent{observe: func(_ context.Context, r *agentv1.ObserveRequest, s *connect.ServerStream[agentv1.ObserveResponse]) error {
		if r.GetAfterSeq() != 7 || r.GetMaxWait().AsDuration() != 10*time.Second {
			return connect.NewError(connect.CodeInvalidArgument, errors.New("not what was asked"))
		}
		if err := s.Send(&agentv1.ObserveResponse{
			Seq: 9, JournalId: "j", Complete: true, VolumesRemoved: []string{"v1"},
			Facts: &agentv1.HostFacts{
				BootId: "b", Cpus: 8, CudaVersion: "12.4", Clock: timestamppb.New(now.Add(2 * time.Hour)), ReservedCpuMillis: 500,
				Devices:   []*agentv1.HostDevice{{Id: "GPU-1", Kind: "gpu", Health: "ok", Model: "4090", MemoryMib: 24564}},
				Unmanaged: []*agentv1.UnmanagedContainer{{Name: "carrel-x-1", Workspace: "x", Epoch: 1, Devices: []string{"GPU-1"}, Running: true}},
			},
			Runs: []*agentv1.ObservedRun{{
				Workspace: "w1", Epoch: 2, Phase: agentv1.RunPhase_RUN_PHASE_GONE, StartedAge: durationpb.New(time.Hour), EndedAge: durationpb.New(-time.Minute),
				ExitCode: &exit, ReasonCode: "exited", LogTail: []string{"a"}, EndedUnattested: true,
			}},
		}); err != nil {
			return err
		}
		return s.Send(&agentv1.ObserveResponse{Seq: 10, JournalId: "j"})
	}}, Settings{})
	var got []fleet.Observation
	if err := c.Observe(t.Context(), "h1", 7, func(o fleet.Observation) error { got = append(got, o); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[1].Seq != 10 || got[1].Facts != nil {
		t.Fatalf("got %+v", got)
	}
	o := got[0]
	if o.Host != "h1" || o.Seq != 9 || o.JournalID != "j" || !o.Complete || o.VolumesRemoved[0] != "v1" {
		t.Errorf("batch %+v", o)
	}
	f := o.Facts
	if f.ClockSkew != 2*time.Hour || f.CPUs != 8 || !f.Devices[0].Present || f.Devices[0].Health != fleet.HealthOK || f.Unmanaged[0].Run.Epoch != 1 || f.ReservedCPUMillis != 500 {
		t.Errorf("facts %+v", f)
	}
	r := o.Runs[0]
	if r.Phase != fleet.PhaseGone || !r.StartedAt.Equal(now.Add(-time.Hour)) || !r.ReadyAt.IsZero() || *r.Reason.ExitCode != 3 || r.Reason.LogTail[0] != "a" || !r.EndedUnattested {
		t.Errorf("run %+v", r)
	}
	if !r.EndedAt.Equal(now) {
		t.Errorf("an end in the future became %v", r.EndedAt)
	}
}

func TestObserveEndsWhenTheHostFallsSilentOrWeFail(t *testing.T) {
	hang := func(ctx context.Context, _ *agentv1.ObserveRequest, s *connect.ServerStream[agentv1.ObserveResponse]) error {
		if err := s.Send(&agentv1.ObserveResponse{Seq: 1}); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}
	c := dial(t, &agent{observe: hang}, Settings{ObserveWait: 50 * time.Millisecond, ObserveGrace: 50 * time.Millisecond})
	batches := 0
	err := c.Observe(t.Context(), "h1", 0, func(fleet.Observation) error { batches++; return nil })
	if batches != 1 || !fleet.IsKind(err, fleet.KindUnavailable) {
		t.Errorf("%d batches, %v", batches, err)
	}
	full := fleet.Errorf(fleet.KindUnavailable, "disk full")
	if err := c.Observe(t.Context(), "h1", 0, func(fleet.Observation) error { return full }); !errors.Is(err, full) {
		t.Errorf("our own failure became %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Observe(ctx, "h1", 0, func(fleet.Observation) error { return nil }); err == nil {
		t.Error("a cancelled call succeeded")
	}
}

func TestErrorsKeepTheirKindAndTheAgentsWords(t *testing.T) {
	for _, c := range []struct {
		code connect.Code
		kind fleet.Kind
	}{
		{connect.CodeFailedPrecondition, fleet.KindConflict},
		{connect.CodeNotFound, fleet.KindNotFound},
		{connect.CodeInvalidArgument, fleet.KindInvalid},
		{connect.CodeResourceExhausted, fleet.KindExhausted},
		{connect.CodeUnavailable, fleet.KindUnavailable},
		{connect.CodeInternal, fleet.KindInternal},
		{connect.CodePermissionDenied, fleet.KindForbidden},
	} {
		client := dial(t, &agent{
			apply: func(*agentv1.ApplyRequest) error { return connect.NewError(c.code, errors.New("in the agent's words")) },
			resolve: func(string) (*agentv1.ResolveImageResponse, error) {
				return nil, connect.NewError(c.code, errors.New("in the agent's words"))
			},
		}, Settings{})
		if err := client.Apply(t.Context(), fleet.DesiredHost{Host: "h1"}); !fleet.IsKind(err, c.kind) || fleet.UserMessage(err) != "in the agent's words" {
			t.Errorf("%v became %v: %v", c.code, fleet.KindOf(err), err)
		}
		if _, err := client.ResolveImage(t.Context(), "h1", "x"); !fleet.IsKind(err, c.kind) {
			t.Errorf("%v became %v: %v", c.code, fleet.KindOf(err), err)
		}
	}
}

// A link that breaks in the middle of a stream is a host that does not answer; how HTTP says so is for the log only.
func TestALinkThatBreaksWithinAStreamIsUnavailable(t *testing.T) {
	c := dial(t, &agent{observe: func(_ context.Context, _ *agentv1.ObserveRequest, s *connect.ServerStream[agentv1.ObserveResponse]) error {
		if err := s.Send(&agentv1.ObserveResponse{Seq: 1}); err != nil {
			return err
		}
		panic(http.ErrAbortHandler)
	}}, Settings{})
	seen := 0
	err := c.Observe(t.Context(), "h1", 0, func(fleet.Observation) error { seen++; return nil })
	if seen != 1 || !fleet.IsKind(err, fleet.KindUnavailable) || fleet.UserMessage(err) != "the host does not answer now; try again" {
		t.Errorf("%d batches, then %v: %v", seen, fleet.KindOf(err), err)
	}
}

func TestAHostWithoutALinkIsUnavailable(t *testing.T) {
	c := New(links{}, identities{}, time.Now, Settings{})
	_, sampleErr := c.Sample(t.Context(), "h1")
	_, resolveErr := c.ResolveImage(t.Context(), "h1", "x")
	for _, err := range []error{
		c.Apply(t.Context(), fleet.DesiredHost{Host: "h1"}), c.Observe(t.Context(), "h1", 0, nil), c.DialBack(t.Context(), "h1", 1), sampleErr, resolveErr,
	} {
		if !fleet.IsKind(err, fleet.KindUnavailable) {
			t.Errorf("%v", err)
		}
	}
}

func TestAnIdentityThatDoesNotOpenSendsNothing(t *testing.T) {
	called := false
	c := dial(t, &agent{apply: func(*agentv1.ApplyRequest) error { called = true; return nil }}, Settings{})
	c.identities = identities{errors.New("seal.key is another")}
	err := c.Apply(t.Context(), fleet.DesiredHost{Host: "h1", Runs: []fleet.DesiredRun{{Run: fleet.Run{Goal: fleet.GoalRunning}, Workspace: fleet.Workspace{ID: "w1"}}}})
	if err == nil || called || !strings.Contains(err.Error(), "w1") {
		t.Errorf("%v, called %v", err, called)
	}
}

func TestSampleAndImage(t *testing.T) {
	use, memory := int32(40), int64(1000)
	c := dial(t, &agent{
		sample: &agentv1.SampleResponse{Devices: []*agentv1.DeviceReading{
			{Id: "GPU-1", UtilizationPercent: &use, MemoryUsedMib: &memory, Age: durationpb.New(3 * time.Second), Processes: []*agentv1.HostProcess{{Pid: 7, Name: "python", Workspace: "w1", Epoch: 2}}},
			{Id: "GPU-2", Stale: true},
		}},
		resolve: func(ref string) (*agentv1.ResolveImageResponse, error) {
			return &agentv1.ResolveImageResponse{Digest: "sha256:" + ref, LocalOnly: true, RequireCuda: "cuda>=12.0"}, nil
		},
	}, Settings{})
	got, err := c.Sample(t.Context(), "h1")
	if err != nil || len(got) != 2 {
		t.Fatal(got, err)
	}
	if s := got[0]; *s.UtilizationPercent != 40 || *s.MemoryUsedMiB != 1000 || !s.At.Equal(now.Add(-3*time.Second)) || s.TemperatureCelsius != nil || s.Processes[0].Run.Epoch != 2 {
		t.Errorf("sample %+v", s)
	}
	if s := got[1]; s.UtilizationPercent != nil || !s.Stale || !s.At.Equal(now) {
		t.Errorf("sample %+v", s)
	}
	image, err := c.ResolveImage(t.Context(), "h1", "x")
	if err != nil || image.Digest != "sha256:x" || !image.LocalOnly || image.RequireCUDA != "cuda>=12.0" {
		t.Errorf("%+v, %v", image, err)
	}
}
