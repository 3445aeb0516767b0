// Package fakegateway is a gateway in memory, on which the CLI is tested.
package fakegateway

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
)

// Deployment is the name that a Gateway gives.
const Deployment = "lab"

// Version is the version that a Gateway gives.
const Version = "v1.4.0"

// Gateway is the whole of it. Its fields are guarded by its methods, but for the settings, which are set before use.
type Gateway struct {
	Server *httptest.Server
	// Removed are procedures that this gateway does not know, such as `/carrel.v1.UsageService/ListRates`.
	Removed map[string]bool
	// Fail makes a procedure fail.
	Fail map[string]*connect.Error
	// OnCreate decides what becomes of a new workspace; nil: it runs at once.
	OnCreate func(w *carrelv1.Workspace)

	mu         sync.Mutex
	changed    chan struct{} // closed and replaced at each change
	codes      map[string]string
	tokens     map[string]*carrelv1.Token // by secret
	keys       map[string]*carrelv1.DeviceKey
	workspaces map[string]*carrelv1.Workspace // by owner/name
	users      map[string]*carrelv1.User
	devices    []*carrelv1.Device
	tickets    map[string]string // ticket to workspace id
	calls      map[string]int
	logs       []*carrelv1.LogLine
	version    int64
	ssh        *sshServer
}

// New starts a gateway on loopback with plain http; it ends with the test.
func New(t testing.TB) *Gateway {
	g := newGateway(t)
	g.Server = httptest.NewServer(g.Handler())
	t.Cleanup(g.Server.Close)
	return g
}

// NewTLS starts a gateway with the certificate that httptest has, which serves as its own CA.
func NewTLS(t testing.TB) *Gateway {
	g := newGateway(t)
	g.Server = httptest.NewUnstartedServer(g.Handler())
	g.Server.EnableHTTP2 = true
	g.Server.StartTLS()
	t.Cleanup(g.Server.Close)
	return g
}

func newGateway(t testing.TB) *Gateway {
	return &Gateway{
		Removed: map[string]bool{}, Fail: map[string]*connect.Error{},
		changed: make(chan struct{}), codes: map[string]string{}, tokens: map[string]*carrelv1.Token{}, keys: map[string]*carrelv1.DeviceKey{},
		workspaces: map[string]*carrelv1.Workspace{}, users: map[string]*carrelv1.User{}, tickets: map[string]string{}, calls: map[string]int{},
		ssh: newSSHServer(t),
	}
}

// Handler serves all of it.
func (g *Gateway) Handler() http.Handler {
	mux := http.NewServeMux()
	opts := connect.WithInterceptors(connect.UnaryInterceptorFunc(g.gate))
	mux.Handle(carrelv1connect.NewAuthServiceHandler(&authService{g: g}, opts))
	mux.Handle(carrelv1connect.NewAttachServiceHandler(&attachService{g: g}, opts))
	mux.Handle(carrelv1connect.NewWorkspaceServiceHandler(&workspaceService{g: g}, opts))
	mux.Handle(carrelv1connect.NewDeviceServiceHandler(&deviceService{g: g}, opts))
	mux.Handle(carrelv1connect.NewUserServiceHandler(&userService{g: g}, opts))
	mux.Handle(carrelv1connect.NewUsageServiceHandler(&usageService{g: g}, opts))
	mux.Handle(carrelv1connect.NewPoolServiceHandler(carrelv1connect.UnimplementedPoolServiceHandler{}, opts))
	mux.Handle(carrelv1connect.NewImageServiceHandler(carrelv1connect.UnimplementedImageServiceHandler{}, opts))
	mux.Handle(carrelv1connect.NewVolumeServiceHandler(carrelv1connect.UnimplementedVolumeServiceHandler{}, opts))
	mux.Handle(carrelv1connect.NewHostServiceHandler(carrelv1connect.UnimplementedHostServiceHandler{}, opts))
	mux.HandleFunc("GET /carrel/attach", g.attach)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g.Removed[r.URL.Path] {
			http.NotFound(w, r)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

type userKey struct{}

// gate counts calls, makes the set ones fail and lets only tokens in.
func (g *Gateway) gate(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		procedure := req.Spec().Procedure
		g.mu.Lock()
		g.calls[procedure]++
		fail := g.Fail[procedure]
		g.mu.Unlock()
		if fail != nil {
			return nil, fail
		}
		switch procedure {
		case carrelv1connect.AuthServiceServerInfoProcedure, carrelv1connect.AuthServiceSignInProcedure:
			return next(ctx, req)
		}
		user, err := g.caller(req.Header())
		if err != nil {
			return nil, err
		}
		return next(context.WithValue(ctx, userKey{}, user), req)
	}
}

func (g *Gateway) caller(h http.Header) (string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	secret := strings.TrimPrefix(h.Get("Authorization"), "Bearer ")
	t, ok := g.tokens[secret]
	if !ok {
		return "", connect.NewError(connect.CodeUnauthenticated, errText("the session has expired or was revoked"))
	}
	if u := g.users[t.GetUser()]; u.GetDisabled() {
		return "", connect.NewError(connect.CodeUnauthenticated, errText("your account is disabled"))
	}
	return t.GetUser(), nil
}

type errText string

func (e errText) Error() string { return string(e) }

func userOf(ctx context.Context) string {
	name, _ := ctx.Value(userKey{}).(string)
	return name
}

// AddUser makes an account and returns a sign-in link for it.
func (g *Gateway) AddUser(name string) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.users[name] == nil {
		id := int64(10000 + len(g.users))
		g.users[name] = &carrelv1.User{Name: name, Login: name, Uid: id, Gid: id, Role: carrelv1.Role_ROLE_MEMBER, Project: "default", CreatedAt: timestamppb.Now()}
	}
	code := random()
	g.codes[code] = name
	return g.link(code)
}

func (g *Gateway) link(code string) string {
	link := g.Server.URL + "/#sign-in=" + code
	if c := g.Server.Certificate(); c != nil {
		sum := sha256.Sum256(c.Raw)
		link += "." + base64.RawURLEncoding.EncodeToString(sum[:])
	}
	return link
}

// RevokeTokens ends all tokens of a user.
func (g *Gateway) RevokeTokens(user string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for secret, t := range g.tokens {
		if t.GetUser() == user {
			delete(g.tokens, secret)
		}
	}
}

// Keys are the registered device keys of a user, in authorized_keys form.
func (g *Gateway) Keys(user string) []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var keys []string
	for _, k := range g.keys {
		if k.GetUser() == user {
			keys = append(keys, k.GetPublicKey())
		}
	}
	return keys
}

// Tokens is the number of tokens of a user.
func (g *Gateway) Tokens(user string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for _, t := range g.tokens {
		if t.GetUser() == user {
			n++
		}
	}
	return n
}

// Calls is how often a procedure was called.
func (g *Gateway) Calls(procedure string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.calls[procedure]
}

// SetDevices replaces the devices.
func (g *Gateway) SetDevices(devices ...*carrelv1.Device) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.devices = devices
	g.wakeLocked()
}

// SetLogs replaces the log lines of all workspaces.
func (g *Gateway) SetLogs(lines ...*carrelv1.LogLine) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.logs = lines
}

// SetLogText is SetLogs of lines that a container wrote.
func (g *Gateway) SetLogText(texts ...string) {
	var lines []*carrelv1.LogLine
	for _, text := range texts {
		lines = append(lines, &carrelv1.LogLine{Source: "container", Text: text})
	}
	g.SetLogs(lines...)
}

// AddWorkspace makes a running workspace.
func (g *Gateway) AddWorkspace(owner, name string) *carrelv1.Workspace {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.newWorkspaceLocked(owner, name, &carrelv1.WorkspaceSpec{})
	run(w)
	return proto.CloneOf(w)
}

// Change changes a workspace, and tells those who watch.
func (g *Gateway) Change(owner, name string, change func(*carrelv1.Workspace)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.changeLocked(g.workspaces[owner+"/"+name], change)
}

// Workspace returns a workspace, nil where there is none.
func (g *Gateway) Workspace(owner, name string) *carrelv1.Workspace {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w := g.workspaces[owner+"/"+name]; w != nil {
		return proto.CloneOf(w)
	}
	return nil
}

func (g *Gateway) changeLocked(w *carrelv1.Workspace, change func(*carrelv1.Workspace)) {
	change(w)
	g.version++
	w.Version = g.version
	g.wakeLocked()
}

func (g *Gateway) wakeLocked() {
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *Gateway) newWorkspaceLocked(owner, name string, spec *carrelv1.WorkspaceSpec) *carrelv1.Workspace {
	g.version++
	id := strings.ToLower(random()[:12])
	w := &carrelv1.Workspace{
		Id: id, Name: name, Owner: owner, Project: "default", Spec: complete(spec), State: carrelv1.WorkspaceState_WORKSPACE_STATE_QUEUED,
		CreatedAt: timestamppb.New(time.Now().Add(-90 * time.Minute)), SshHost: name + ".carrel", SshPrincipal: name + ".carrel." + id, Login: g.users[owner].GetLogin(),
		Sudo: "yes", Version: g.version, Run: &carrelv1.Run{Epoch: 1, QueuedAt: timestamppb.Now()},
		Origins: map[string]string{"gpu": "default", "image": "pool default", "memory_mib": "host share per device", "cpu_millis": "host share per device", "pool": "default pool", "shm_mib": "half of memory", "pids_limit": "default"},
		Mounts:  []*carrelv1.MountStatus{{VolumeId: "v" + id, Name: name + "-home", Target: "/home/" + owner, Home: true}},
	}
	g.workspaces[owner+"/"+name] = w
	return w
}

func complete(in *carrelv1.WorkspaceSpec) *carrelv1.WorkspaceSpec {
	s := proto.CloneOf(in)
	if s == nil {
		s = &carrelv1.WorkspaceSpec{}
	}
	if s.Gpu == nil {
		s.Gpu = &carrelv1.GpuRequest{Count: 1}
	}
	if s.Pool == "" {
		s.Pool = "default"
	}
	if s.Image == "" {
		s.Image = "base"
	}
	s.ImageDigest = "sha256:" + strings.Repeat("ab", 32)
	for _, f := range []struct {
		field *int64
		value int64
	}{{&s.CpuMillis, 8000}, {&s.MemoryMib, 65536}, {&s.ShmMib, 32768}, {&s.PidsLimit, 4096}} {
		if *f.field == 0 {
			*f.field = f.value
		}
	}
	return s
}

// run makes a workspace run.
func run(w *carrelv1.Workspace) {
	w.State = carrelv1.WorkspaceState_WORKSPACE_STATE_RUNNING
	w.Queue, w.Pull, w.Reason = nil, nil, nil
	if w.Run == nil {
		w.Run = &carrelv1.Run{Epoch: 1}
	}
	w.Run.Host, w.Run.StartedAt = "h1", timestamppb.Now()
}

// Run makes a workspace run; for OnCreate and Change.
func Run(w *carrelv1.Workspace) { run(w) }

func (g *Gateway) findLocked(user, ref string) (*carrelv1.Workspace, error) {
	var near []*carrelv1.Workspace
	for key, w := range g.workspaces {
		if w.GetState() == carrelv1.WorkspaceState_WORKSPACE_STATE_DELETED && w.GetId() != ref {
			continue
		}
		if key == ref || w.GetOwner() == user && (w.GetName() == ref || w.GetId() == ref) {
			return w, nil
		}
		if w.GetOwner() == user && ref != "" && strings.HasPrefix(w.GetName(), ref) {
			near = append(near, w)
		}
	}
	switch len(near) {
	case 0:
		return nil, connect.NewError(connect.CodeNotFound, errText("no workspace "+ref+"; `carrel ls` shows yours"))
	case 1:
		return near[0], nil
	}
	return nil, connect.NewError(connect.CodeInvalidArgument, errText(ref+" could be several workspaces"))
}

func (g *Gateway) listLocked(user string, all bool) []*carrelv1.Workspace {
	var list []*carrelv1.Workspace
	for _, w := range g.workspaces {
		if (all || w.GetOwner() == user) && w.GetState() != carrelv1.WorkspaceState_WORKSPACE_STATE_DELETED {
			list = append(list, proto.CloneOf(w))
		}
	}
	sort.Slice(list, func(i, j int) bool {
		return list[i].GetOwner()+"/"+list[i].GetName() < list[j].GetOwner()+"/"+list[j].GetName()
	})
	return list
}

func random() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}
