package rpc

import (
	"context"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/event"
	"github.com/carrel-dev/carrel/services/fleet"
)

// DeviceStore keeps devices.
type DeviceStore interface {
	Devices(ctx context.Context, filter fleet.DeviceFilter) ([]fleet.DeviceRow, error)
	SetExcluded(ctx context.Context, id fleet.DeviceID, excluded bool, reason string, now time.Time) (fleet.Device, error)
}

// Samples has the last measurement of each device.
type Samples interface {
	Sample(device fleet.DeviceID) (fleet.Sample, bool)
}

// WorkspaceNames tells whose a run is, for the processes of a device.
type WorkspaceNames interface {
	WorkspaceOwner(ctx context.Context, id fleet.WorkspaceID) (workspace, user string, ok bool)
}

// Devices serves DeviceService.
type Devices struct {
	Store   DeviceStore
	Samples Samples
	Links   Links
	Names   WorkspaceNames
	Orders  HostOrders
	Watcher Watcher
	Now     func() time.Time
}

var _ carrelv1connect.DeviceServiceHandler = (*Devices)(nil)

func (d *Devices) all(ctx context.Context, filter fleet.DeviceFilter) ([]*carrelv1.Device, error) {
	rows, err := d.Store.Devices(ctx, filter)
	if err != nil {
		return nil, err
	}
	actor := actorOf(ctx)
	out := make([]*carrelv1.Device, 0, len(rows))
	for _, row := range rows {
		wire := d.row(ctx, row, actor)
		if filter.FreeOnly && !wire.GetFree() {
			continue
		}
		out = append(out, wire)
	}
	return out, nil
}

// row converts one device. Everybody sees which user holds it; the workspace's name is its owner's and the admins' business.
func (d *Devices) row(ctx context.Context, row fleet.DeviceRow, actor auth.Actor) *carrelv1.Device {
	wire := deviceOnWire(row.Device)
	wire.Host, wire.Pool = row.HostName, row.Pool
	if lease := row.Lease; lease != nil {
		wire.User, wire.LeasedAt = lease.UserName, stamp(lease.StartedAt)
		if actor.Admin() || lease.User == actor.User.ID {
			wire.Workspace = lease.Workspace
		}
	}
	usable, why := row.Offered()
	if !usable && wire.GetHealthReason() == "" {
		wire.HealthReason = why
	}
	if since := d.Links.UnreachableSince(row.Host); !since.IsZero() {
		usable = false
		wire.Health, wire.HealthReason = "away", "host "+row.HostName+" does not answer since "+since.Format(time.RFC3339)
	}
	wire.Free = usable && row.Free
	if usable && !row.Free && row.Lease == nil {
		wire.Health, wire.HealthReason = "foreign", "a container that this gateway did not ask for holds it"
	}
	if sample, ok := d.Samples.Sample(row.ID); ok {
		wire.Sample = d.sample(ctx, sample, actor)
	}
	return wire
}

func (d *Devices) sample(ctx context.Context, s fleet.Sample, actor auth.Actor) *carrelv1.DeviceSample {
	out := sampleOnWire(s)
	for i, p := range s.Processes {
		if p.Run.Workspace == "" {
			continue
		}
		workspace, user, ok := d.Names.WorkspaceOwner(ctx, p.Run.Workspace)
		if !ok {
			continue
		}
		out.Processes[i].User = user
		if actor.Admin() || user == actor.User.Name {
			out.Processes[i].Workspace = workspace
		} else {
			out.Processes[i].Name, out.Processes[i].Pid = "", 0 // what another runs is theirs; that they hold memory is not
		}
	}
	return out
}

func sampleOnWire(s fleet.Sample) *carrelv1.DeviceSample {
	out := &carrelv1.DeviceSample{At: stamp(s.At), MemoryUsedMib: s.MemoryUsedMiB, PowerWatts: s.PowerWatts, Stale: s.Stale}
	out.UtilizationPercent, out.TemperatureCelsius = int32Of(s.UtilizationPercent), int32Of(s.TemperatureCelsius)
	for _, p := range s.Processes {
		out.Processes = append(out.Processes, &carrelv1.Process{Pid: p.PID, Name: p.Name, MemoryMib: p.MemoryMiB, Graphics: p.Graphics})
	}
	return out
}

func int32Of(n *int) *int32 {
	if n == nil {
		return nil
	}
	v := int32(*n)
	return &v
}

// List returns devices by host, then index.
func (d *Devices) List(ctx context.Context, req *connect.Request[carrelv1.DeviceServiceListRequest]) (*connect.Response[carrelv1.DeviceServiceListResponse], error) {
	devices, err := d.all(ctx, fleet.DeviceFilter{Pool: req.Msg.GetPool(), FreeOnly: req.Msg.GetFreeOnly()})
	if err != nil {
		return nil, err
	}
	page, next, err := slicePage(devices, req.Msg.GetPageSize(), req.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.DeviceServiceListResponse{Devices: page, NextPageToken: next}), nil
}

// Watch sends all devices, at once and after each change or sample.
func (d *Devices) Watch(ctx context.Context, req *connect.Request[carrelv1.DeviceServiceWatchRequest], stream *connect.ServerStream[carrelv1.DeviceServiceWatchResponse]) error {
	first := true
	return d.Watcher.Each(ctx, event.Filter{Topic: event.Devices}, func() error {
		devices, err := d.all(ctx, fleet.DeviceFilter{Pool: req.Msg.GetPool()})
		if err != nil {
			return err
		}
		err = stream.Send(&carrelv1.DeviceServiceWatchResponse{Devices: devices, Complete: first})
		first = false
		return err
	})
}

// SetExcluded takes a device out of use, or gives it back.
func (d *Devices) SetExcluded(ctx context.Context, req *connect.Request[carrelv1.SetExcludedRequest]) (*connect.Response[carrelv1.SetExcludedResponse], error) {
	device, err := d.Store.SetExcluded(ctx, fleet.DeviceID(req.Msg.GetDeviceId()), req.Msg.GetExcluded(), req.Msg.GetReason(), d.Now())
	if err != nil {
		return nil, err
	}
	d.Orders.Replan()
	return connect.NewResponse(&carrelv1.SetExcludedResponse{Device: deviceOnWire(device)}), nil
}
