package rpc

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/services/fleet"
)

// stamp converts a time; the zero time is absent.
func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// timeOf converts back; absent is the zero time. KindInvalid.
func timeOf(what string, t *timestamppb.Timestamp) (time.Time, error) {
	if t == nil {
		return time.Time{}, nil
	}
	if err := t.CheckValid(); err != nil {
		return time.Time{}, fleet.Errorf(fleet.KindInvalid, "%s is no time: %v", what, err)
	}
	return t.AsTime(), nil
}

// durationOf converts a duration; absent is def. KindInvalid unless it is positive.
func durationOf(what string, d *durationpb.Duration, def time.Duration) (time.Duration, error) {
	if d == nil {
		return def, nil
	}
	if err := d.CheckValid(); err != nil || d.AsDuration() <= 0 {
		return 0, fleet.Errorf(fleet.KindInvalid, "%s must be a duration of more than 0s", what)
	}
	return d.AsDuration(), nil
}

var stateOnWire = map[fleet.State]carrelv1.WorkspaceState{
	fleet.StateQueued:   carrelv1.WorkspaceState_WORKSPACE_STATE_QUEUED,
	fleet.StatePulling:  carrelv1.WorkspaceState_WORKSPACE_STATE_PULLING,
	fleet.StateStarting: carrelv1.WorkspaceState_WORKSPACE_STATE_STARTING,
	fleet.StateRunning:  carrelv1.WorkspaceState_WORKSPACE_STATE_RUNNING,
	fleet.StateStopping: carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPING,
	fleet.StateStopped:  carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPED,
	fleet.StateFailed:   carrelv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	fleet.StateDeleted:  carrelv1.WorkspaceState_WORKSPACE_STATE_DELETED,
}

var kindOnWire = map[fleet.DeviceKind]carrelv1.DeviceKind{
	fleet.KindGPU:       carrelv1.DeviceKind_DEVICE_KIND_GPU,
	fleet.KindMIG:       carrelv1.DeviceKind_DEVICE_KIND_MIG,
	fleet.KindMIGParent: carrelv1.DeviceKind_DEVICE_KIND_MIG_PARENT,
}

func reasonOnWire(r fleet.Reason) *carrelv1.Reason {
	if r.Code == "" && r.Message == "" {
		return nil
	}
	out := &carrelv1.Reason{Code: r.Code, Message: r.Message, LogTail: r.LogTail}
	if r.ExitCode != nil {
		code := int32(*r.ExitCode)
		out.ExitCode = &code
	}
	return out
}

func specOnWire(s fleet.Spec) *carrelv1.WorkspaceSpec {
	out := &carrelv1.WorkspaceSpec{
		Pool: s.Pool, Image: s.Image, ImageDigest: s.ImageDigest,
		Gpu:       &carrelv1.GpuRequest{Count: int32(s.GPU.Count), Models: s.GPU.Models},
		CpuMillis: s.CPUMillis, MemoryMib: s.MemoryMiB, ShmMib: s.ShmMiB, PidsLimit: s.PidsLimit, Env: s.Env,
	}
	for _, v := range s.Volumes {
		out.Volumes = append(out.Volumes, &carrelv1.VolumeMount{Volume: v.Volume, Target: v.Target, ReadOnly: v.ReadOnly})
	}
	return out
}

// specFromWire converts a request's spec; an absent GPU request is one of any model.
func specFromWire(s *carrelv1.WorkspaceSpec) fleet.Spec {
	spec := fleet.Spec{GPU: fleet.GPURequest{Count: 1}}
	if s == nil {
		return spec
	}
	spec.Pool, spec.Image, spec.Env = s.GetPool(), s.GetImage(), s.GetEnv()
	spec.CPUMillis, spec.MemoryMiB, spec.ShmMiB, spec.PidsLimit = s.GetCpuMillis(), s.GetMemoryMib(), s.GetShmMib(), s.GetPidsLimit()
	if s.GetGpu() != nil {
		spec.GPU = fleet.GPURequest{Count: int(s.GetGpu().GetCount()), Models: s.GetGpu().GetModels()}
	}
	for _, v := range s.GetVolumes() {
		spec.Volumes = append(spec.Volumes, fleet.VolumeUse{Volume: v.GetVolume(), Target: v.GetTarget(), ReadOnly: v.GetReadOnly()})
	}
	return spec
}

func leaseOnWire(l fleet.Lease) *carrelv1.Lease {
	return &carrelv1.Lease{
		Id: leaseID(l.ID), DeviceId: string(l.Device), Model: l.Model, Host: l.HostName, Epoch: l.Run.Epoch,
		StartedAt: stamp(l.StartedAt), EndedAt: stamp(l.EndedAt), ReleasedAt: stamp(l.ReleasedAt), Provisional: l.Provisional,
	}
}

func runOnWire(r fleet.Run, host string) *carrelv1.Run {
	if r.Key.Epoch == 0 {
		return nil
	}
	return &carrelv1.Run{
		Epoch: r.Key.Epoch, Host: host, ImageDigest: r.ImageDigest, QueuedAt: stamp(r.QueuedAt), PlacedAt: stamp(r.PlacedAt),
		StartedAt: stamp(r.StartedAt), ReadyAt: stamp(r.ReadyAt), EndedAt: stamp(r.EndedAt),
	}
}

func mountsOnWire(mounts []fleet.Mount) []*carrelv1.MountStatus {
	out := make([]*carrelv1.MountStatus, 0, len(mounts))
	for _, m := range mounts {
		out = append(out, &carrelv1.MountStatus{VolumeId: string(m.Volume), Name: m.Name, Target: m.Target, ReadOnly: m.ReadOnly, Home: m.Home})
	}
	return out
}

func deviceOnWire(d fleet.Device) *carrelv1.Device {
	out := &carrelv1.Device{
		Id: string(d.ID), Index: int32(d.Index), Product: d.Product, Model: d.Model, MemoryMib: d.MemoryMiB,
		ComputeCapability: d.ComputeCapability, PciBusId: d.PCIBusID, Kind: kindOnWire[d.Kind], Parent: string(d.Parent),
		Simulated: d.Simulated, Health: d.Health, HealthReason: d.HealthReason,
	}
	switch {
	case d.Excluded:
		out.Health, out.HealthReason = "excluded", d.ExcludedReason
	case !d.Present:
		out.Health, out.HealthReason = "lost", "no longer in the host's inventory"
	}
	return out
}
