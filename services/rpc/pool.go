package rpc

import (
	"context"
	"slices"
	"strings"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/event"
	"github.com/carrel-dev/carrel/services/fleet"
)

// PoolStore keeps pools.
type PoolStore interface {
	Pools(ctx context.Context) ([]fleet.Pool, error)
	CreatePool(ctx context.Context, pool fleet.Pool) error
	UpdatePool(ctx context.Context, name string, change func(*fleet.Pool) error) (fleet.Pool, error)
	Hosts(ctx context.Context) ([]fleet.Host, error)
	Devices(ctx context.Context, filter fleet.DeviceFilter) ([]fleet.DeviceRow, error)
}

// Pools serves PoolService.
type Pools struct {
	Store   PoolStore
	Links   Links
	Orders  HostOrders
	Watcher Watcher
	// Queued returns how many workspaces wait in each pool.
	Queued func(ctx context.Context) (map[string]int, error)
}

var _ carrelv1connect.PoolServiceHandler = (*Pools)(nil)

func (p *Pools) all(ctx context.Context) ([]*carrelv1.Pool, error) {
	pools, err := p.Store.Pools(ctx)
	if err != nil {
		return nil, err
	}
	hosts, err := p.Store.Hosts(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := p.Store.Devices(ctx, fleet.DeviceFilter{})
	if err != nil {
		return nil, err
	}
	queued, err := p.Queued(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]*carrelv1.Pool, 0, len(pools))
	for _, pool := range pools {
		wire := poolOnWire(pool)
		wire.Models = p.models(pool.Name, rows)
		wire.Queued = int32(queued[pool.Name])
		for _, h := range hosts {
			if h.Pool == pool.Name {
				wire.Hosts++
			}
		}
		out = append(out, wire)
	}
	return out, nil
}

func (p *Pools) models(pool string, rows []fleet.DeviceRow) []*carrelv1.ModelCount {
	counts := map[string]*carrelv1.ModelCount{}
	for _, row := range rows {
		ok, _ := row.Offered()
		if row.Pool != pool || !ok {
			continue
		}
		c := counts[row.Model]
		if c == nil {
			c = &carrelv1.ModelCount{Model: row.Model}
			counts[row.Model] = c
		}
		c.Total++
		if row.Free && p.Links.UnreachableSince(row.Host).IsZero() {
			c.Free++
		}
	}
	list := make([]*carrelv1.ModelCount, 0, len(counts))
	for _, c := range counts {
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b *carrelv1.ModelCount) int { return strings.Compare(a.GetModel(), b.GetModel()) })
	return list
}

// List returns pools by name.
func (p *Pools) List(ctx context.Context, req *connect.Request[carrelv1.PoolServiceListRequest]) (*connect.Response[carrelv1.PoolServiceListResponse], error) {
	pools, err := p.all(ctx)
	if err != nil {
		return nil, err
	}
	page, next, err := slicePage(pools, req.Msg.GetPageSize(), req.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.PoolServiceListResponse{Pools: page, NextPageToken: next}), nil
}

// Watch sends all pools, at once and after each change.
func (p *Pools) Watch(ctx context.Context, _ *connect.Request[carrelv1.PoolServiceWatchRequest], stream *connect.ServerStream[carrelv1.PoolServiceWatchResponse]) error {
	return p.Watcher.Each(ctx, event.Filter{Topic: event.Pools}, func() error {
		pools, err := p.all(ctx)
		if err != nil {
			return err
		}
		return stream.Send(&carrelv1.PoolServiceWatchResponse{Pools: pools})
	})
}

// Create makes a pool.
func (p *Pools) Create(ctx context.Context, req *connect.Request[carrelv1.PoolServiceCreateRequest]) (*connect.Response[carrelv1.PoolServiceCreateResponse], error) {
	pool := poolFromWire(req.Msg.GetPool())
	if err := checkPool(pool); err != nil {
		return nil, err
	}
	if err := p.Store.CreatePool(ctx, pool); err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.PoolServiceCreateResponse{Pool: poolOnWire(pool)}), nil
}

// Update changes a pool.
func (p *Pools) Update(ctx context.Context, req *connect.Request[carrelv1.PoolServiceUpdateRequest]) (*connect.Response[carrelv1.PoolServiceUpdateResponse], error) {
	wire := poolFromWire(req.Msg.GetPool())
	pool, err := p.Store.UpdatePool(ctx, wire.Name, func(pool *fleet.Pool) error {
		if err := applyPoolFields(pool, wire, req.Msg.GetFields()); err != nil {
			return err
		}
		return checkPool(*pool)
	})
	if err != nil {
		return nil, err
	}
	p.Orders.Replan()
	return connect.NewResponse(&carrelv1.PoolServiceUpdateResponse{Pool: poolOnWire(pool)}), nil
}

func applyPoolFields(pool *fleet.Pool, wire fleet.Pool, fields []string) error {
	if len(fields) == 0 {
		return fleet.Errorf(fleet.KindInvalid, "name at least one field to change")
	}
	for _, field := range fields {
		switch field {
		case "description":
			pool.Description = wire.Description
		case "default_image":
			pool.DefaultImage = wire.DefaultImage
		case "sudo":
			pool.Sudo = wire.Sudo
		case "is_default":
			pool.Default = wire.Default
		case "max_gpus_per_workspace":
			pool.MaxGPUsPerWorkspace = wire.MaxGPUsPerWorkspace
		case "default_cpu_millis":
			pool.DefaultCPUMillis = wire.DefaultCPUMillis
		case "default_memory_mib":
			pool.DefaultMemoryMiB = wire.DefaultMemoryMiB
		default:
			return fleet.Errorf(fleet.KindInvalid, "%q is no field of a pool that can be changed", field)
		}
	}
	return nil
}

func checkPool(p fleet.Pool) error {
	if err := fleet.CheckName("pool", p.Name); err != nil {
		return err
	}
	if p.MaxGPUsPerWorkspace < 0 || p.DefaultCPUMillis < 0 || p.DefaultMemoryMiB < 0 {
		return fleet.Errorf(fleet.KindInvalid, "limits of pool %s must be 0 (none) or more", p.Name)
	}
	return nil
}

func poolOnWire(p fleet.Pool) *carrelv1.Pool {
	return &carrelv1.Pool{
		Name: p.Name, Description: p.Description, DefaultImage: p.DefaultImage, Sudo: p.Sudo, IsDefault: p.Default,
		MaxGpusPerWorkspace: int32(p.MaxGPUsPerWorkspace), DefaultCpuMillis: p.DefaultCPUMillis, DefaultMemoryMib: p.DefaultMemoryMiB,
	}
}

func poolFromWire(p *carrelv1.Pool) fleet.Pool {
	return fleet.Pool{
		Name: p.GetName(), Description: p.GetDescription(), DefaultImage: p.GetDefaultImage(), Sudo: p.GetSudo(), Default: p.GetIsDefault(),
		MaxGPUsPerWorkspace: int(p.GetMaxGpusPerWorkspace()), DefaultCPUMillis: p.GetDefaultCpuMillis(), DefaultMemoryMiB: p.GetDefaultMemoryMib(),
	}
}
