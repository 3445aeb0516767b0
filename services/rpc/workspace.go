package rpc

import (
	"context"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/event"
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/lifecycle"
)

// WorkspaceOrders leads workspaces through their lives.
type WorkspaceOrders interface {
	Create(ctx context.Context, o lifecycle.CreateOrder) (w fleet.Workspace, replay bool, err error)
	Plan(ctx context.Context, o lifecycle.CreateOrder) (lifecycle.Preview, error)
	Start(ctx context.Context, o lifecycle.StartOrder) (fleet.Workspace, error)
	Stop(ctx context.Context, id fleet.WorkspaceID, by string, grace time.Duration) (fleet.Workspace, error)
	Restart(ctx context.Context, o lifecycle.RestartOrder) (fleet.Workspace, error)
	Update(ctx context.Context, o lifecycle.UpdateOrder) (fleet.Workspace, error)
	Delete(ctx context.Context, id fleet.WorkspaceID, by string, dropHome bool) (fleet.Workspace, error)
}

// WorkspaceStore reads workspaces.
type WorkspaceStore interface {
	WorkspaceViews
	FindWorkspace(ctx context.Context, owner fleet.UserID, ref string) (fleet.Workspace, error)
	Workspace(ctx context.Context, id fleet.WorkspaceID) (fleet.Workspace, error)
	Workspaces(ctx context.Context, filter fleet.WorkspaceFilter) ([]fleet.Workspace, string, error)
	UserByName(ctx context.Context, name string) (fleet.User, error)
	User(ctx context.Context, id fleet.UserID) (fleet.User, error)
	Events(ctx context.Context, workspace fleet.WorkspaceID, limit int) ([]fleet.Event, error)
	Run(ctx context.Context, key fleet.RunKey) (fleet.Run, error)
}

// LogSource sends what a run's first process wrote.
type LogSource interface {
	Logs(ctx context.Context, host fleet.HostID, run fleet.RunKey, follow bool, tail int, send func(at time.Time, line string) error) error
}

// Workspaces serves WorkspaceService.
type Workspaces struct {
	Store    WorkspaceStore
	Orders   WorkspaceOrders
	Progress Progress
	Watcher  Watcher
	LogLines LogSource
}

var _ carrelv1connect.WorkspaceServiceHandler = (*Workspaces)(nil)

func (s *Workspaces) view(ctx context.Context, id fleet.WorkspaceID) (*carrelv1.Workspace, error) {
	v := viewer{views: s.Store, progress: s.Progress}
	return v.workspace(ctx, id)
}

// find resolves a reference that the actor may use. An admin's may be the id of anybody's workspace.
func (s *Workspaces) find(ctx context.Context, ref string) (fleet.Workspace, error) {
	actor := actorOf(ctx)
	owner, rest, err := ownerOf(ctx, s.Store, actor, ref)
	if err != nil {
		return fleet.Workspace{}, err
	}
	w, err := s.Store.FindWorkspace(ctx, owner, rest)
	if !fleet.IsKind(err, fleet.KindNotFound) || !actor.Admin() {
		return w, err
	}
	if other, otherErr := s.Store.Workspace(ctx, fleet.WorkspaceID(rest)); otherErr == nil && other.State != fleet.StateDeleted && rest == ref {
		return other, nil
	}
	return w, err
}

func createOrder(ctx context.Context, name, project string, spec *carrelv1.WorkspaceSpec) lifecycle.CreateOrder {
	return lifecycle.CreateOrder{
		Owner: actorOf(ctx).User, Name: name, Project: project, Spec: specFromWire(spec), DefaultGPU: spec.GetGpu() == nil,
	}
}

// Create makes a workspace, and starts it unless asked not to.
func (s *Workspaces) Create(ctx context.Context, req *connect.Request[carrelv1.CreateRequest]) (*connect.Response[carrelv1.CreateResponse], error) {
	order := createOrder(ctx, req.Msg.GetName(), req.Msg.GetProject(), req.Msg.GetSpec())
	order.RequestID, order.Stopped, order.FreshHome = req.Msg.GetRequestId(), req.Msg.GetStopped(), req.Msg.GetFreshHome()
	w, _, err := s.Orders.Create(ctx, order)
	if err != nil {
		return nil, err
	}
	wire, err := s.view(ctx, w.ID)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.CreateResponse{Workspace: wire}), nil
}

// Plan tells what Create would give.
func (s *Workspaces) Plan(ctx context.Context, req *connect.Request[carrelv1.PlanRequest]) (*connect.Response[carrelv1.PlanResponse], error) {
	preview, err := s.Orders.Plan(ctx, createOrder(ctx, req.Msg.GetName(), req.Msg.GetProject(), req.Msg.GetSpec()))
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.PlanResponse{
		Workspace: workspaceOnWire(preview.Workspace), StartsNow: preview.StartsNow, Host: preview.Host, WhyNot: preview.Why,
	}), nil
}

// Get returns one workspace.
func (s *Workspaces) Get(ctx context.Context, req *connect.Request[carrelv1.GetRequest]) (*connect.Response[carrelv1.GetResponse], error) {
	w, err := s.find(ctx, req.Msg.GetWorkspace())
	if err != nil {
		return nil, err
	}
	wire, err := s.view(ctx, w.ID)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.GetResponse{Workspace: wire}), nil
}

// scope returns whose workspaces a call covers: empty for everybody's.
func scope(ctx context.Context, all bool) (fleet.UserID, error) {
	actor := actorOf(ctx)
	if !all {
		return actor.User.ID, nil
	}
	if !actor.Admin() {
		return "", fleet.Errorf(fleet.KindForbidden, "only an admin may list everybody's workspaces")
	}
	return "", nil
}

// List returns a page of workspaces.
func (s *Workspaces) List(ctx context.Context, req *connect.Request[carrelv1.ListRequest]) (*connect.Response[carrelv1.ListResponse], error) {
	limit, err := pageSize(req.Msg.GetPageSize())
	if err != nil {
		return nil, err
	}
	owner, err := scope(ctx, req.Msg.GetAllUsers())
	if err != nil {
		return nil, err
	}
	filter := fleet.WorkspaceFilter{Owner: owner, IncludeDeleted: req.Msg.GetIncludeDeleted(), Limit: limit, After: req.Msg.GetPageToken()}
	page, next, err := s.Store.Workspaces(ctx, filter)
	if err != nil {
		return nil, err
	}
	res := &carrelv1.ListResponse{NextPageToken: next}
	for _, w := range page {
		wire, err := s.view(ctx, w.ID)
		if err != nil {
			return nil, err
		}
		res.Workspaces = append(res.Workspaces, wire)
	}
	return connect.NewResponse(res), nil
}

// Update changes what the next run will get.
func (s *Workspaces) Update(ctx context.Context, req *connect.Request[carrelv1.UpdateRequest]) (*connect.Response[carrelv1.UpdateResponse], error) {
	w, err := s.find(ctx, req.Msg.GetWorkspace())
	if err != nil {
		return nil, err
	}
	order := lifecycle.UpdateOrder{Workspace: w.ID, Spec: specFromWire(req.Msg.GetSpec()), Fields: req.Msg.GetFields(), IfVersion: req.Msg.GetIfVersion()}
	if _, err := s.Orders.Update(ctx, order); err != nil {
		return nil, err
	}
	wire, err := s.view(ctx, w.ID)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.UpdateResponse{Workspace: wire}), nil
}

// Start queues a new run.
func (s *Workspaces) Start(ctx context.Context, req *connect.Request[carrelv1.StartRequest]) (*connect.Response[carrelv1.StartResponse], error) {
	wire, err := s.order(ctx, req.Msg.GetWorkspace(), func(ctx context.Context, id fleet.WorkspaceID) (fleet.Workspace, error) {
		return s.Orders.Start(ctx, lifecycle.StartOrder{Workspace: id, By: actorOf(ctx).User, RequestID: req.Msg.GetRequestId()})
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.StartResponse{Workspace: wire}), nil
}

// Stop ends the run.
func (s *Workspaces) Stop(ctx context.Context, req *connect.Request[carrelv1.StopRequest]) (*connect.Response[carrelv1.StopResponse], error) {
	grace, err := graceOf(req.Msg.GetGrace())
	if err != nil {
		return nil, err
	}
	wire, err := s.order(ctx, req.Msg.GetWorkspace(), func(ctx context.Context, id fleet.WorkspaceID) (fleet.Workspace, error) {
		return s.Orders.Stop(ctx, id, actorOf(ctx).User.Name, grace)
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.StopResponse{Workspace: wire}), nil
}

// Restart ends the run and starts another on the same devices.
func (s *Workspaces) Restart(ctx context.Context, req *connect.Request[carrelv1.RestartRequest]) (*connect.Response[carrelv1.RestartResponse], error) {
	wire, err := s.order(ctx, req.Msg.GetWorkspace(), func(ctx context.Context, id fleet.WorkspaceID) (fleet.Workspace, error) {
		return s.Orders.Restart(ctx, lifecycle.RestartOrder{Workspace: id, By: actorOf(ctx).User, UpdateImage: req.Msg.GetUpdateImage(), RequestID: req.Msg.GetRequestId()})
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.RestartResponse{Workspace: wire}), nil
}

// Delete ends the run and removes the workspace.
func (s *Workspaces) Delete(ctx context.Context, req *connect.Request[carrelv1.DeleteRequest]) (*connect.Response[carrelv1.DeleteResponse], error) {
	w, err := s.find(ctx, req.Msg.GetWorkspace())
	if err != nil {
		return nil, err
	}
	before, err := s.Store.View(ctx, w.ID)
	if err != nil {
		return nil, err
	}
	if _, err := s.Orders.Delete(ctx, w.ID, actorOf(ctx).User.Name, req.Msg.GetDeleteHome()); err != nil {
		return nil, err
	}
	wire, err := s.view(ctx, w.ID)
	if err != nil {
		return nil, err
	}
	res := &carrelv1.DeleteResponse{Workspace: wire}
	for _, m := range before.Mounts {
		if m.Volume != "" && (!m.Home || !req.Msg.GetDeleteHome()) {
			res.KeptVolumes = append(res.KeptVolumes, m.Name)
		}
	}
	return connect.NewResponse(res), nil
}

// order resolves a reference, carries out one order and returns the workspace after it.
func (s *Workspaces) order(ctx context.Context, ref string, act func(context.Context, fleet.WorkspaceID) (fleet.Workspace, error)) (*carrelv1.Workspace, error) {
	w, err := s.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	if _, err := act(ctx, w.ID); err != nil {
		return nil, err
	}
	return s.view(ctx, w.ID)
}

// Watch sends the full state of one or of all visible workspaces, at once and after each change.
func (s *Workspaces) Watch(ctx context.Context, req *connect.Request[carrelv1.WatchRequest], stream *connect.ServerStream[carrelv1.WatchResponse]) error {
	if ref := req.Msg.GetWorkspace(); ref != "" {
		w, err := s.find(ctx, ref)
		if err != nil {
			return err
		}
		return s.watchOne(ctx, w.ID, stream)
	}
	owner, err := scope(ctx, req.Msg.GetAllUsers())
	if err != nil {
		return err
	}
	return s.watchAll(ctx, owner, stream)
}

func (s *Workspaces) watchOne(ctx context.Context, id fleet.WorkspaceID, stream *connect.ServerStream[carrelv1.WatchResponse]) error {
	first := true
	return s.Watcher.Each(ctx, event.Filter{Topic: event.Workspaces, Workspace: id}, func() error {
		wire, err := s.view(ctx, id)
		if err != nil {
			return err
		}
		if err := stream.Send(&carrelv1.WatchResponse{Workspace: wire}); err != nil {
			return err
		}
		if first {
			first = false
			return stream.Send(&carrelv1.WatchResponse{})
		}
		return nil
	})
}

// watchAll sends, after the first picture, only workspaces whose version moved on.
func (s *Workspaces) watchAll(ctx context.Context, owner fleet.UserID, stream *connect.ServerStream[carrelv1.WatchResponse]) error {
	sent := map[fleet.WorkspaceID]int64{}
	first := true
	return s.Watcher.Each(ctx, event.Filter{Topic: event.Workspaces, Owner: owner}, func() error {
		changed, err := s.changed(ctx, owner, sent)
		if err != nil {
			return err
		}
		for _, wire := range changed {
			if err := stream.Send(&carrelv1.WatchResponse{Workspace: wire}); err != nil {
				return err
			}
		}
		if first || len(changed) == 0 {
			first = false
			return stream.Send(&carrelv1.WatchResponse{}) // marker, or keep-alive
		}
		return nil
	})
}

// changed returns the workspaces that moved on since they were sent, deleted ones once; a waiting or pulling one is always sent, since its
// progress has no version.
func (s *Workspaces) changed(ctx context.Context, owner fleet.UserID, sent map[fleet.WorkspaceID]int64) ([]*carrelv1.Workspace, error) {
	var out []*carrelv1.Workspace
	seen := map[fleet.WorkspaceID]bool{}
	for after := ""; ; {
		page, next, err := s.Store.Workspaces(ctx, fleet.WorkspaceFilter{Owner: owner, Limit: largestPage, After: after})
		if err != nil {
			return nil, err
		}
		for _, w := range page {
			seen[w.ID] = true
			moving := w.State == fleet.StateQueued || w.State == fleet.StatePulling
			if old, ok := sent[w.ID]; ok && old == w.Version && !moving {
				continue
			}
			wire, err := s.view(ctx, w.ID)
			if err != nil {
				return nil, err
			}
			sent[w.ID] = w.Version
			out = append(out, wire)
		}
		if next == "" {
			break
		}
		after = next
	}
	for id := range sent {
		if seen[id] {
			continue
		}
		delete(sent, id)
		wire, err := s.view(ctx, id)
		if err != nil {
			return nil, err
		}
		out = append(out, wire)
	}
	return out, nil
}
