package rpc

import (
	"context"
	"crypto/ed25519"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/event"
	"github.com/carrel-dev/carrel/services/fleet"
)

// longestJoin is the most that a join token may live (threat T-12).
const longestJoin = time.Hour

// HostStore keeps hosts and join tokens.
type HostStore interface {
	Host(ctx context.Context, idOrName string) (fleet.Host, error)
	Hosts(ctx context.Context) ([]fleet.Host, error)
	SetDraining(ctx context.Context, id fleet.HostID, draining bool, now time.Time) error
	AddJoinToken(ctx context.Context, grant fleet.JoinGrant) error
	JoinHost(ctx context.Context, hash []byte, name string, publicKey []byte, version string, now time.Time) (fleet.Host, error)
	Pool(ctx context.Context, name string) (fleet.Pool, error)
	Pools(ctx context.Context) ([]fleet.Pool, error)
	Devices(ctx context.Context, filter fleet.DeviceFilter) ([]fleet.DeviceRow, error)
}

// Links knows which hosts answer.
type Links interface {
	// UnreachableSince returns since when a host has not answered; zero while it does.
	UnreachableSince(host fleet.HostID) time.Time
	// Trouble says why a host that answers does not take orders; empty when it does.
	Trouble(host fleet.HostID) string
}

// HostOrders is what an admin can do to a host that touches workspaces.
type HostOrders interface {
	Fence(ctx context.Context, host fleet.HostID, reason string) (int, error)
	// Replan asks for a new plan, since a host can take work again or no more.
	Replan()
}

// Hosts serves HostService.
type Hosts struct {
	Store    HostStore
	Links    Links
	Orders   HostOrders
	Watcher  Watcher
	Now      func() time.Time
	JoinLife time.Duration
	// JoinText makes the token that is shown once.
	JoinText func(secret string) string
	// Challenges issues what agents sign.
	Challenges *auth.Challenges
}

var _ carrelv1connect.HostServiceHandler = (*Hosts)(nil)

func (h *Hosts) all(ctx context.Context) ([]*carrelv1.Host, error) {
	hosts, err := h.Store.Hosts(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := h.Store.Devices(ctx, fleet.DeviceFilter{})
	if err != nil {
		return nil, err
	}
	total, free := map[fleet.HostID]int32{}, map[fleet.HostID]int32{}
	for _, row := range rows {
		if ok, _ := row.Offered(); ok {
			total[row.Host]++
			if row.Free {
				free[row.Host]++
			}
		}
	}
	admin := actorOf(ctx).Admin()
	out := make([]*carrelv1.Host, 0, len(hosts))
	for _, host := range hosts {
		wire := hostOnWire(host, h.Links.UnreachableSince(host.ID), admin)
		if trouble := h.Links.Trouble(host.ID); trouble != "" {
			wire.Problems = append(wire.Problems, "does not take this gateway's orders: "+trouble)
		}
		wire.Gpus, wire.GpusFree = total[host.ID], free[host.ID]
		out = append(out, wire)
	}
	return out, nil
}

// List returns hosts by name.
func (h *Hosts) List(ctx context.Context, req *connect.Request[carrelv1.HostServiceListRequest]) (*connect.Response[carrelv1.HostServiceListResponse], error) {
	hosts, err := h.all(ctx)
	if err != nil {
		return nil, err
	}
	page, next, err := slicePage(hosts, req.Msg.GetPageSize(), req.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.HostServiceListResponse{Hosts: page, NextPageToken: next}), nil
}

// Watch sends all hosts, at once and after each change.
func (h *Hosts) Watch(ctx context.Context, _ *connect.Request[carrelv1.HostServiceWatchRequest], stream *connect.ServerStream[carrelv1.HostServiceWatchResponse]) error {
	first := true
	return h.Watcher.Each(ctx, event.Filter{Topic: event.Hosts}, func() error {
		hosts, err := h.all(ctx)
		if err != nil {
			return err
		}
		err = stream.Send(&carrelv1.HostServiceWatchResponse{Hosts: hosts, Complete: first})
		first = false
		return err
	})
}

// CreateJoinToken makes a one-use token with which an agent joins.
func (h *Hosts) CreateJoinToken(ctx context.Context, req *connect.Request[carrelv1.CreateJoinTokenRequest]) (*connect.Response[carrelv1.CreateJoinTokenResponse], error) {
	life, err := durationOf("ttl", req.Msg.GetTtl(), h.JoinLife)
	if err != nil {
		return nil, err
	}
	if life > longestJoin {
		return nil, fleet.Errorf(fleet.KindInvalid, "a join token lives %s at most", longestJoin)
	}
	pool := req.Msg.GetPool()
	if pool == "" {
		if pool, err = defaultPool(ctx, h.Store); err != nil {
			return nil, err
		}
	}
	if _, err := h.Store.Pool(ctx, pool); err != nil {
		return nil, err
	}
	if name := req.Msg.GetHost(); name != "" {
		if err := fleet.CheckName("host", name); err != nil {
			return nil, err
		}
	}
	code := auth.NewCode()
	expires := h.Now().Add(life)
	if err := h.Store.AddJoinToken(ctx, fleet.JoinGrant{Hash: code.Hash, Pool: pool, Host: req.Msg.GetHost(), ExpiresAt: expires}); err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.CreateJoinTokenResponse{Token: h.JoinText(code.Text), ExpiresAt: stamp(expires)}), nil
}

func defaultPool(ctx context.Context, store interface {
	Pools(ctx context.Context) ([]fleet.Pool, error)
},
) (string, error) {
	pools, err := store.Pools(ctx)
	if err != nil {
		return "", err
	}
	for _, p := range pools {
		if p.Default {
			return p.Name, nil
		}
	}
	return "", fleet.Errorf(fleet.KindConflict, "no pool is the default one; name a pool, or run `carrel pool set NAME --default`")
}

// SetDraining stops new placements on a host, or allows them again.
func (h *Hosts) SetDraining(ctx context.Context, req *connect.Request[carrelv1.SetDrainingRequest]) (*connect.Response[carrelv1.SetDrainingResponse], error) {
	host, err := h.Store.Host(ctx, req.Msg.GetHost())
	if err != nil {
		return nil, err
	}
	if err := h.Store.SetDraining(ctx, host.ID, req.Msg.GetDraining(), h.Now()); err != nil {
		return nil, err
	}
	host.Draining = req.Msg.GetDraining()
	h.Orders.Replan()
	return connect.NewResponse(&carrelv1.SetDrainingResponse{Host: hostOnWire(host, h.Links.UnreachableSince(host.ID), true)}), nil
}

// Fence ends the leases of a host that does not answer.
func (h *Hosts) Fence(ctx context.Context, req *connect.Request[carrelv1.FenceRequest]) (*connect.Response[carrelv1.FenceResponse], error) {
	host, err := h.Store.Host(ctx, req.Msg.GetHost())
	if err != nil {
		return nil, err
	}
	since := h.Links.UnreachableSince(host.ID)
	if since.IsZero() {
		return nil, fleet.Errorf(fleet.KindConflict, "host %s answers; fencing is for one that does not. Use `carrel host drain %s`", host.Name, host.Name)
	}
	if req.Msg.GetReason() == "" {
		return nil, fleet.Errorf(fleet.KindInvalid, "say why: the reason is kept with the fence")
	}
	ended, err := h.Orders.Fence(ctx, host.ID, req.Msg.GetReason())
	if err != nil {
		return nil, err
	}
	if host, err = h.Store.Host(ctx, string(host.ID)); err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.FenceResponse{Host: hostOnWire(host, since, true), LeasesEnded: int32(ended)}), nil
}

// Join turns a join token into a host identity.
func (h *Hosts) Join(ctx context.Context, req *connect.Request[carrelv1.JoinRequest]) (*connect.Response[carrelv1.JoinResponse], error) {
	if err := fleet.CheckName("host", req.Msg.GetName()); err != nil {
		return nil, err
	}
	if len(req.Msg.GetPublicKey()) != ed25519.PublicKeySize {
		return nil, fleet.Errorf(fleet.KindInvalid, "public_key must be an ed25519 key of %d bytes", ed25519.PublicKeySize)
	}
	host, err := h.Store.JoinHost(ctx, auth.Hash(req.Msg.GetToken()), req.Msg.GetName(), req.Msg.GetPublicKey(), req.Msg.GetVersion(), h.Now())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.JoinResponse{HostId: string(host.ID), Name: host.Name}), nil
}

// Challenge returns a nonce for an agent to sign. It answers for unknown hosts too, so that nobody learns which exist.
func (h *Hosts) Challenge(_ context.Context, req *connect.Request[carrelv1.ChallengeRequest]) (*connect.Response[carrelv1.ChallengeResponse], error) {
	nonce, err := h.Challenges.Issue(req.Msg.GetHostId(), h.Now())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.ChallengeResponse{Nonce: nonce}), nil
}

// hostOnWire converts a host; only an admin sees what runs on it beside Carrel.
func hostOnWire(h fleet.Host, unreachable time.Time, admin bool) *carrelv1.Host {
	out := &carrelv1.Host{
		Id: string(h.ID), Name: h.Name, Pool: h.Pool, State: hostState(h, unreachable), UnreachableSince: stamp(unreachable),
		AgentVersion: h.AgentVersion, EngineVersion: h.EngineVersion, Os: h.OS, Cpus: int32(h.CPUs), MemoryMib: h.MemoryMiB, DiskFreeMib: h.DiskFreeMiB,
		GpuSource: h.GPUSource, DriverVersion: h.DriverVersion, CudaVersion: h.CUDAVersion, Problems: h.Problems,
		ClockSkewMs: h.ClockSkew.Milliseconds(), JoinedAt: stamp(h.JoinedAt),
	}
	if admin {
		for _, u := range h.Unmanaged {
			out.Unmanaged = append(out.Unmanaged, u.Name)
		}
	}
	return out
}

func hostState(h fleet.Host, unreachable time.Time) string {
	switch {
	case h.Fenced:
		return "fenced"
	case h.LastSeen.IsZero():
		return "new"
	case !unreachable.IsZero():
		return "unreachable"
	case h.Draining:
		return "draining"
	}
	return "ready"
}
