package fakegateway

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/crypto/ssh"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
)

type authService struct {
	carrelv1connect.UnimplementedAuthServiceHandler
	g *Gateway
}

func (s *authService) ServerInfo(context.Context, *connect.Request[carrelv1.ServerInfoRequest]) (*connect.Response[carrelv1.ServerInfoResponse], error) {
	return connect.NewResponse(&carrelv1.ServerInfoResponse{Version: Version, Deployment: Deployment, MinClientVersion: "v1.0.0"}), nil
}

func (s *authService) SignIn(_ context.Context, req *connect.Request[carrelv1.SignInRequest]) (*connect.Response[carrelv1.SignInResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	user, ok := s.g.codes[req.Msg.GetCode()]
	if !ok {
		return nil, connect.NewError(connect.CodeUnauthenticated, errText("this sign-in is used up or expired"))
	}
	delete(s.g.codes, req.Msg.GetCode())
	secret := "carrel_" + random()
	ends := timestamppb.New(time.Now().Add(90 * 24 * time.Hour))
	s.g.tokens[secret] = &carrelv1.Token{Id: random()[:8], User: user, Label: req.Msg.GetLabel(), CreatedAt: timestamppb.Now(), ExpiresAt: ends}
	return connect.NewResponse(&carrelv1.SignInResponse{Token: secret, User: s.g.users[user], ExpiresAt: ends}), nil
}

func (s *authService) SignOut(_ context.Context, req *connect.Request[carrelv1.SignOutRequest]) (*connect.Response[carrelv1.SignOutResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	delete(s.g.tokens, req.Header().Get("Authorization")[len("Bearer "):])
	return connect.NewResponse(&carrelv1.SignOutResponse{}), nil
}

func (s *authService) WhoAmI(ctx context.Context, req *connect.Request[carrelv1.WhoAmIRequest]) (*connect.Response[carrelv1.WhoAmIResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	t := s.g.tokens[req.Header().Get("Authorization")[len("Bearer "):]]
	return connect.NewResponse(&carrelv1.WhoAmIResponse{User: s.g.users[userOf(ctx)], Token: t}), nil
}

func (s *authService) ListTokens(ctx context.Context, _ *connect.Request[carrelv1.ListTokensRequest]) (*connect.Response[carrelv1.ListTokensResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	resp := &carrelv1.ListTokensResponse{}
	for _, t := range s.g.tokens {
		if t.GetUser() == userOf(ctx) {
			resp.Tokens = append(resp.Tokens, t)
		}
	}
	return connect.NewResponse(resp), nil
}

func (s *authService) AddDeviceKey(ctx context.Context, req *connect.Request[carrelv1.AddDeviceKeyRequest]) (*connect.Response[carrelv1.AddDeviceKeyResponse], error) {
	key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(req.Msg.GetPublicKey()))
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	fingerprint := ssh.FingerprintSHA256(key)
	if old := s.g.keys[fingerprint]; old != nil {
		if old.GetUser() != userOf(ctx) {
			return nil, connect.NewError(connect.CodeAlreadyExists, errText("this key is another user's"))
		}
		return connect.NewResponse(&carrelv1.AddDeviceKeyResponse{Key: old}), nil
	}
	k := &carrelv1.DeviceKey{Id: random()[:8], User: userOf(ctx), PublicKey: req.Msg.GetPublicKey(), Fingerprint: fingerprint, Label: req.Msg.GetLabel(), CreatedAt: timestamppb.Now()}
	s.g.keys[fingerprint] = k
	return connect.NewResponse(&carrelv1.AddDeviceKeyResponse{Key: k}), nil
}

func (s *authService) RevokeDeviceKey(ctx context.Context, req *connect.Request[carrelv1.RevokeDeviceKeyRequest]) (*connect.Response[carrelv1.RevokeDeviceKeyResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	for fingerprint, k := range s.g.keys {
		if k.GetUser() == userOf(ctx) && (fingerprint == req.Msg.GetId() || k.GetId() == req.Msg.GetId()) {
			delete(s.g.keys, fingerprint)
			return connect.NewResponse(&carrelv1.RevokeDeviceKeyResponse{}), nil
		}
	}
	return nil, connect.NewError(connect.CodeNotFound, errText("no such key"))
}

type workspaceService struct {
	carrelv1connect.UnimplementedWorkspaceServiceHandler
	g *Gateway
}

func (s *workspaceService) Plan(_ context.Context, req *connect.Request[carrelv1.PlanRequest]) (*connect.Response[carrelv1.PlanResponse], error) {
	w := &carrelv1.Workspace{
		Name: req.Msg.GetName(), Project: "default", Spec: complete(req.Msg.GetSpec()),
		Origins: map[string]string{"gpu": "default", "image": "pool default", "memory_mib": "host share per device"},
	}
	return connect.NewResponse(&carrelv1.PlanResponse{Workspace: w, StartsNow: true, Host: "h1"}), nil
}

func (s *workspaceService) Create(ctx context.Context, req *connect.Request[carrelv1.CreateRequest]) (*connect.Response[carrelv1.CreateResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	key := userOf(ctx) + "/" + req.Msg.GetName()
	if w := s.g.workspaces[key]; w != nil && w.GetState() != carrelv1.WorkspaceState_WORKSPACE_STATE_DELETED {
		return nil, connect.NewError(connect.CodeAlreadyExists, errText(req.Msg.GetName()+" exists"))
	}
	w := s.g.newWorkspaceLocked(userOf(ctx), req.Msg.GetName(), req.Msg.GetSpec())
	if s.g.OnCreate != nil {
		s.g.OnCreate(w)
	} else {
		run(w)
	}
	return connect.NewResponse(&carrelv1.CreateResponse{Workspace: proto.CloneOf(w)}), nil
}

func (s *workspaceService) Get(ctx context.Context, req *connect.Request[carrelv1.GetRequest]) (*connect.Response[carrelv1.GetResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	w, err := s.g.findLocked(userOf(ctx), req.Msg.GetWorkspace())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.GetResponse{Workspace: proto.CloneOf(w)}), nil
}

func (s *workspaceService) List(ctx context.Context, req *connect.Request[carrelv1.ListRequest]) (*connect.Response[carrelv1.ListResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	all := s.g.listLocked(userOf(ctx), req.Msg.GetAllUsers())
	begin := 0
	_, _ = fmt.Sscan(req.Msg.GetPageToken(), &begin)
	const page = 3 // small, so that every test of a list goes over pages
	end := min(begin+page, len(all))
	resp := &carrelv1.ListResponse{Workspaces: all[begin:end]}
	if end < len(all) {
		resp.NextPageToken = fmt.Sprint(end)
	}
	return connect.NewResponse(resp), nil
}

func (s *workspaceService) Update(ctx context.Context, req *connect.Request[carrelv1.UpdateRequest]) (*connect.Response[carrelv1.UpdateResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	w, err := s.g.findLocked(userOf(ctx), req.Msg.GetWorkspace())
	if err != nil {
		return nil, err
	}
	if v := req.Msg.GetIfVersion(); v != 0 && v != w.GetVersion() {
		return nil, connect.NewError(connect.CodeAborted, errText("it was changed in between"))
	}
	s.g.changeLocked(w, func(w *carrelv1.Workspace) {
		from, to := req.Msg.GetSpec().ProtoReflect(), w.GetSpec().ProtoReflect()
		for _, f := range req.Msg.GetFields() {
			d := to.Descriptor().Fields().ByTextName(f)
			to.Set(d, from.Get(d))
		}
		w.Pending = req.Msg.GetFields()
	})
	return connect.NewResponse(&carrelv1.UpdateResponse{Workspace: proto.CloneOf(w)}), nil
}

func (s *workspaceService) Start(ctx context.Context, req *connect.Request[carrelv1.StartRequest]) (*connect.Response[carrelv1.StartResponse], error) {
	w, err := s.move(ctx, req.Msg.GetWorkspace(), func(w *carrelv1.Workspace) {
		if w.GetState() != carrelv1.WorkspaceState_WORKSPACE_STATE_RUNNING {
			w.Run = &carrelv1.Run{Epoch: w.GetRun().GetEpoch() + 1}
			w.State, w.Pending = carrelv1.WorkspaceState_WORKSPACE_STATE_STARTING, nil
		}
	}, run)
	return connect.NewResponse(&carrelv1.StartResponse{Workspace: w}), err
}

func (s *workspaceService) Restart(ctx context.Context, req *connect.Request[carrelv1.RestartRequest]) (*connect.Response[carrelv1.RestartResponse], error) {
	w, err := s.move(ctx, req.Msg.GetWorkspace(), func(w *carrelv1.Workspace) {
		w.State, w.Pending = carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPING, nil
	}, func(w *carrelv1.Workspace) {
		w.Run = &carrelv1.Run{Epoch: w.GetRun().GetEpoch() + 1}
		run(w)
	})
	return connect.NewResponse(&carrelv1.RestartResponse{Workspace: w}), err
}

func (s *workspaceService) Stop(ctx context.Context, req *connect.Request[carrelv1.StopRequest]) (*connect.Response[carrelv1.StopResponse], error) {
	w, err := s.move(ctx, req.Msg.GetWorkspace(), func(w *carrelv1.Workspace) {
		w.State = carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPING
	}, func(w *carrelv1.Workspace) {
		w.State = carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPED
		w.Reason = &carrelv1.Reason{Code: "stopped_by_user", Message: "You stopped it."}
	})
	return connect.NewResponse(&carrelv1.StopResponse{Workspace: w}), err
}

func (s *workspaceService) Delete(ctx context.Context, req *connect.Request[carrelv1.DeleteRequest]) (*connect.Response[carrelv1.DeleteResponse], error) {
	w, err := s.move(ctx, req.Msg.GetWorkspace(), func(w *carrelv1.Workspace) {
		w.State = carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPING
	}, func(w *carrelv1.Workspace) {
		w.State = carrelv1.WorkspaceState_WORKSPACE_STATE_DELETED
	})
	resp := &carrelv1.DeleteResponse{Workspace: w}
	if !req.Msg.GetDeleteHome() {
		resp.KeptVolumes = []string{w.GetName() + "-home"}
	}
	return connect.NewResponse(resp), err
}

// move makes one change now and returns its state, and another at once behind it.
func (s *workspaceService) move(ctx context.Context, ref string, now, next func(*carrelv1.Workspace)) (*carrelv1.Workspace, error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	w, err := s.g.findLocked(userOf(ctx), ref)
	if err != nil {
		return nil, err
	}
	s.g.changeLocked(w, now)
	answer := proto.CloneOf(w)
	s.g.changeLocked(w, next)
	return answer, nil
}

func (s *workspaceService) Watch(ctx context.Context, req *connect.Request[carrelv1.WatchRequest], stream *connect.ServerStream[carrelv1.WatchResponse]) error {
	user, err := s.g.caller(req.Header())
	if err != nil {
		return err
	}
	sent := map[string]int64{}
	for first := true; ; first = false {
		s.g.mu.Lock()
		changed := s.g.changed
		list := s.g.listLocked(user, req.Msg.GetAllUsers())
		if ref := req.Msg.GetWorkspace(); ref != "" {
			w, err := s.g.findLocked(user, ref)
			if err != nil {
				s.g.mu.Unlock()
				return err
			}
			list = []*carrelv1.Workspace{proto.CloneOf(w)}
		}
		s.g.mu.Unlock()
		for _, w := range list {
			if sent[w.GetId()] == w.GetVersion() {
				continue
			}
			sent[w.GetId()] = w.GetVersion()
			if err := stream.Send(&carrelv1.WatchResponse{Workspace: w}); err != nil {
				return err
			}
		}
		if first {
			if err := stream.Send(&carrelv1.WatchResponse{}); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

func (s *workspaceService) Logs(ctx context.Context, req *connect.Request[carrelv1.LogsRequest], stream *connect.ServerStream[carrelv1.LogsResponse]) error {
	user, err := s.g.caller(req.Header())
	if err != nil {
		return err
	}
	s.g.mu.Lock()
	_, err = s.g.findLocked(user, req.Msg.GetWorkspace())
	lines := s.g.logs
	s.g.mu.Unlock()
	if err != nil {
		return err
	}
	if n := int(req.Msg.GetTail()); n > 0 && n < len(lines) {
		lines = lines[len(lines)-n:]
	}
	return stream.Send(&carrelv1.LogsResponse{Lines: lines})
}

type deviceService struct {
	carrelv1connect.UnimplementedDeviceServiceHandler
	g *Gateway
}

func (s *deviceService) List(_ context.Context, req *connect.Request[carrelv1.DeviceServiceListRequest]) (*connect.Response[carrelv1.DeviceServiceListResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	resp := &carrelv1.DeviceServiceListResponse{}
	for _, d := range s.g.devices {
		if (d.GetFree() || !req.Msg.GetFreeOnly()) && (req.Msg.GetPool() == "" || req.Msg.GetPool() == d.GetPool()) {
			resp.Devices = append(resp.Devices, d)
		}
	}
	return connect.NewResponse(resp), nil
}

func (s *deviceService) Watch(ctx context.Context, req *connect.Request[carrelv1.DeviceServiceWatchRequest], stream *connect.ServerStream[carrelv1.DeviceServiceWatchResponse]) error {
	for first := true; ; first = false {
		s.g.mu.Lock()
		changed, devices := s.g.changed, s.g.devices
		s.g.mu.Unlock()
		if err := stream.Send(&carrelv1.DeviceServiceWatchResponse{Devices: devices, Complete: first}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

type userService struct {
	carrelv1connect.UnimplementedUserServiceHandler
	g *Gateway
}

func (s *userService) List(context.Context, *connect.Request[carrelv1.UserServiceListRequest]) (*connect.Response[carrelv1.UserServiceListResponse], error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	resp := &carrelv1.UserServiceListResponse{}
	for _, u := range s.g.users {
		resp.Users = append(resp.Users, u)
	}
	return connect.NewResponse(resp), nil
}

func (s *userService) Add(_ context.Context, req *connect.Request[carrelv1.UserServiceAddRequest]) (*connect.Response[carrelv1.UserServiceAddResponse], error) {
	resp := &carrelv1.UserServiceAddResponse{}
	for _, u := range req.Msg.GetUsers() {
		added := &carrelv1.AddedUser{User: u}
		if u.GetName() == "taken" {
			added.Error = "user taken exists; choose another name"
		} else {
			added.SignIn = s.g.AddUser(u.GetName())
		}
		resp.Users = append(resp.Users, added)
	}
	return connect.NewResponse(resp), nil
}

type usageService struct {
	carrelv1connect.UnimplementedUsageServiceHandler
	g *Gateway
}

func (s *usageService) Report(_ context.Context, req *connect.Request[carrelv1.ReportRequest]) (*connect.Response[carrelv1.ReportResponse], error) {
	to := req.Msg.GetTo()
	if to == nil {
		to = timestamppb.Now()
	}
	row := func(key string, ms, cost int64) *carrelv1.UsageRow {
		return &carrelv1.UsageRow{Key: key, GpuMs: ms, ActiveMs: ms / 2, IdleMs: ms - ms/2, CostMicros: cost, Leases: 2}
	}
	return connect.NewResponse(&carrelv1.ReportResponse{
		Rows: []*carrelv1.UsageRow{row("ana", 7_200_123, 900_015), row("bo", 360, 45)}, Total: row("", 7_200_483, 900_060),
		From: req.Msg.GetFrom(), To: to, TimeZone: req.Msg.GetTimeZone(), Currency: "EUR",
	}), nil
}

func (s *usageService) ListRates(context.Context, *connect.Request[carrelv1.ListRatesRequest]) (*connect.Response[carrelv1.ListRatesResponse], error) {
	return connect.NewResponse(&carrelv1.ListRatesResponse{Rates: []*carrelv1.Rate{{Model: "4090", MicrosPerHour: 450_000, Currency: "EUR", From: timestamppb.Now()}}}), nil
}

func (s *usageService) Check(context.Context, *connect.Request[carrelv1.CheckRequest]) (*connect.Response[carrelv1.CheckResponse], error) {
	return connect.NewResponse(&carrelv1.CheckResponse{Leases: 3, Differences: []string{"lease l1: 4 ms too long"}}), nil
}
