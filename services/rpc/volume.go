package rpc

import (
	"context"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/fleet"
)

// VolumeStore keeps volumes.
type VolumeStore interface {
	Volumes(ctx context.Context, owner fleet.UserID, includeDeleted bool) ([]fleet.Volume, error)
	DeleteVolume(ctx context.Context, owner fleet.UserID, idOrName string, now time.Time) (fleet.Volume, error)
	RestoreVolume(ctx context.Context, owner fleet.UserID, idOrName, as string, now time.Time) (fleet.Volume, error)
}

// Volumes serves VolumeService.
type Volumes struct {
	Store    VolumeStore
	Declared []fleet.DeclaredMount
	Now      func() time.Time
}

var _ carrelv1connect.VolumeServiceHandler = (*Volumes)(nil)

// List returns volumes by owner, then name, then the declared mounts.
func (v *Volumes) List(ctx context.Context, req *connect.Request[carrelv1.VolumeServiceListRequest]) (*connect.Response[carrelv1.VolumeServiceListResponse], error) {
	actor := actorOf(ctx)
	owner := actor.User.ID
	if req.Msg.GetAllUsers() {
		if !actor.Admin() {
			return nil, fleet.Errorf(fleet.KindForbidden, "only an admin may list everybody's volumes")
		}
		owner = ""
	}
	volumes, err := v.Store.Volumes(ctx, owner, req.Msg.GetIncludeDeleted())
	if err != nil {
		return nil, err
	}
	wires := make([]*carrelv1.Volume, 0, len(volumes)+len(v.Declared))
	for _, volume := range volumes {
		wires = append(wires, volumeOnWire(volume))
	}
	for _, m := range v.Declared {
		wires = append(wires, &carrelv1.Volume{Name: m.Name, Kind: carrelv1.VolumeKind_VOLUME_KIND_DECLARED})
	}
	page, next, err := slicePage(wires, req.Msg.GetPageSize(), req.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.VolumeServiceListResponse{Volumes: page, NextPageToken: next}), nil
}

// Delete marks a volume deleted.
func (v *Volumes) Delete(ctx context.Context, req *connect.Request[carrelv1.VolumeServiceDeleteRequest]) (*connect.Response[carrelv1.VolumeServiceDeleteResponse], error) {
	volume, err := v.Store.DeleteVolume(ctx, actorOf(ctx).User.ID, req.Msg.GetVolume(), v.Now())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.VolumeServiceDeleteResponse{Volume: volumeOnWire(volume)}), nil
}

// Restore takes back a Delete.
func (v *Volumes) Restore(ctx context.Context, req *connect.Request[carrelv1.RestoreRequest]) (*connect.Response[carrelv1.RestoreResponse], error) {
	if as := req.Msg.GetAs(); as != "" {
		if err := fleet.CheckVolumeName(as); err != nil {
			return nil, err
		}
	}
	volume, err := v.Store.RestoreVolume(ctx, actorOf(ctx).User.ID, req.Msg.GetVolume(), req.Msg.GetAs(), v.Now())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.RestoreResponse{Volume: volumeOnWire(volume)}), nil
}

func volumeOnWire(v fleet.Volume) *carrelv1.Volume {
	out := &carrelv1.Volume{
		Id: string(v.ID), Name: v.Name, Owner: v.OwnerName, Kind: carrelv1.VolumeKind_VOLUME_KIND_LOCAL, Host: v.HostName, Workspaces: v.UsedBy,
		CreatedAt: stamp(v.CreatedAt), DeletedAt: stamp(v.DeletedAt), HomeOf: v.HomeOf,
	}
	if !v.DeletedAt.IsZero() {
		out.RestorableUntil = stamp(v.DeletedAt.Add(fleet.VolumeRetention))
	}
	return out
}
