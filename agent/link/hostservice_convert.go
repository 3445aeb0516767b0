package link

import (
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/host"
	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
)

func stampOf(s *agentv1.Stamp) host.Stamp {
	return host.Stamp{Database: s.GetDatabaseGeneration(), Session: s.GetHostSession(), Generation: s.GetGeneration()}
}

func stampProto(s host.Stamp) *agentv1.Stamp {
	return &agentv1.Stamp{DatabaseGeneration: s.Database, HostSession: s.Session, Generation: s.Generation}
}

func setOf(m *agentv1.ApplyRequest) (host.Set, error) {
	if m.GetStamp() == nil {
		return host.Set{}, host.Errorf(host.KindInvalid, "a set without stamp")
	}
	set := host.Set{VolumesGone: m.GetVolumesGone(), ExcludedDevices: m.GetExcludedDevices(), Deployment: m.GetDeployment()}
	for _, r := range m.GetRuns() {
		set.Runs = append(set.Runs, desiredOf(r))
	}
	return set, nil
}

// goalOf leaves what is not given as nothing, which the host refuses.
func goalOf(s agentv1.DesiredState) host.Goal {
	switch s {
	case agentv1.DesiredState_DESIRED_STATE_RUNNING:
		return host.GoalRunning
	case agentv1.DesiredState_DESIRED_STATE_GONE:
		return host.GoalGone
	case agentv1.DesiredState_DESIRED_STATE_UNSPECIFIED:
	}
	return ""
}

func desiredOf(r *agentv1.DesiredRun) host.Desired {
	d := host.Desired{
		Key: host.Key{Workspace: r.GetWorkspace(), Epoch: r.GetEpoch()}, Goal: goalOf(r.GetDesired()), Name: r.GetName(), Owner: r.GetOwner(),
		ImageReference: r.GetImageReference(), ImageDigest: r.GetImageDigest(),
		Identity:  host.Identity{Login: r.GetIdentity().GetLogin(), UID: r.GetIdentity().GetUid(), GID: r.GetIdentity().GetGid()},
		CPUMillis: r.GetCpuMillis(), MemoryMiB: r.GetMemoryMib(), ShmMiB: r.GetShmMib(), PidsLimit: r.GetPidsLimit(),
		Env: r.GetEnv(), Sudo: r.GetSudo(), StopGrace: r.GetStopGrace().AsDuration(), Project: r.GetProject(), Pool: r.GetPool(), Reason: r.GetReason(),
		SSH: host.SSH{HostKey: r.GetSsh().GetHostKey(), HostCertificate: r.GetSsh().GetHostCertificate(), AuthorizedKeys: r.GetSsh().GetAuthorizedKeys()},
	}
	for _, g := range r.GetIdentity().GetGroups() {
		d.Identity.Groups = append(d.Identity.Groups, host.Group{Name: g.GetName(), GID: g.GetGid()})
	}
	for _, g := range r.GetDevices() {
		d.Devices = append(d.Devices, host.Grant{ID: g.GetId(), Simulated: g.GetSimulated()})
	}
	for _, m := range r.GetMounts() {
		d.Mounts = append(d.Mounts, mountOf(m))
	}
	return d
}

// mountOf keeps only what belongs to the mount's kind; one of no kind is left with nothing, which the host refuses.
func mountOf(m *agentv1.Mount) host.Mount {
	out := host.Mount{Target: m.GetTarget(), ReadOnly: m.GetReadOnly(), Home: m.GetHome(), Name: m.GetName(), Public: m.GetPublic()}
	switch m.GetKind() {
	case agentv1.MountKind_MOUNT_KIND_LOCAL:
		out.Volume = m.GetVolumeId()
	case agentv1.MountKind_MOUNT_KIND_DECLARED:
		out.HostPath = m.GetHostPath()
	case agentv1.MountKind_MOUNT_KIND_UNSPECIFIED:
	}
	return out
}

func batchProto(b host.Batch) *agentv1.ObserveResponse {
	out := &agentv1.ObserveResponse{Seq: b.Seq, Complete: b.Complete, JournalId: b.JournalID, VolumesRemoved: b.VolumesRemoved}
	if b.Facts != nil {
		out.Facts = factsProto(b.Facts)
	}
	for i := range b.Runs {
		out.Runs = append(out.Runs, observedProto(&b.Runs[i]))
	}
	return out
}

func phaseProto(p host.Phase) agentv1.RunPhase {
	switch p {
	case host.PhasePulling:
		return agentv1.RunPhase_RUN_PHASE_PULLING
	case host.PhaseStarting:
		return agentv1.RunPhase_RUN_PHASE_STARTING
	case host.PhaseReady:
		return agentv1.RunPhase_RUN_PHASE_READY
	case host.PhaseStopping:
		return agentv1.RunPhase_RUN_PHASE_STOPPING
	case host.PhaseGone:
		return agentv1.RunPhase_RUN_PHASE_GONE
	}
	return agentv1.RunPhase_RUN_PHASE_UNSPECIFIED
}

func observedProto(o *host.Observed) *agentv1.ObservedRun {
	out := &agentv1.ObservedRun{
		Workspace: o.Key.Workspace, Epoch: o.Key.Epoch, Phase: phaseProto(o.Phase), ContainerId: o.ContainerID,
		StartedAge: ageProto(o.StartedAge), ReadyAge: ageProto(o.ReadyAge), EndedAge: ageProto(o.EndedAge), EndedUnattested: o.EndedUnattested,
		OutOfMemory: o.OutOfMemory, ReasonCode: o.Reason.Code, ReasonMessage: validText(o.Reason.Message),
		PullBytesDone: o.PullDone, PullBytesTotal: o.PullTotal, Sudo: o.Sudo, ImageDigest: o.ImageDigest, EngineSilent: ageProto(o.EngineSilent),
	}
	if o.ExitCode != nil {
		code := int32(*o.ExitCode)
		out.ExitCode = &code
	}
	for _, line := range o.LogTail {
		out.LogTail = append(out.LogTail, validText(line))
	}
	return out
}

func ageProto(d *time.Duration) *durationpb.Duration {
	if d == nil {
		return nil
	}
	return durationpb.New(*d)
}

func factsProto(f *host.Facts) *agentv1.HostFacts {
	out := &agentv1.HostFacts{
		BootId: f.BootID, AgentVersion: f.AgentVersion, EngineVersion: f.EngineVersion, Os: f.OS,
		Cpus: int32(f.CPUs), MemoryMib: f.MemoryMiB, DiskFreeMib: f.DiskFreeMiB,
		GpuSource: f.GPUSource, DriverVersion: f.DriverVersion, CudaVersion: f.CUDAVersion,
		Clock: timestamppb.New(f.Clock), ReservedCpuMillis: f.ReservedCPUMillis, ReservedMemoryMib: f.ReservedMemoryMiB,
	}
	for _, p := range f.Problems {
		out.Problems = append(out.Problems, validText(p))
	}
	for _, d := range f.Devices {
		out.Devices = append(out.Devices, deviceProto(d))
	}
	for _, u := range f.Unmanaged {
		out.Unmanaged = append(out.Unmanaged, &agentv1.UnmanagedContainer{
			Name: u.Name, Workspace: u.Key.Workspace, Epoch: u.Key.Epoch, Devices: u.Devices, Running: u.Running,
		})
	}
	return out
}

func deviceProto(d host.Device) *agentv1.HostDevice {
	kind := string(d.Kind)
	if d.Kind == gpu.KindMIGInstance {
		kind = "mig"
	}
	return &agentv1.HostDevice{
		Id: d.UUID, Index: int32(d.Index), Product: d.Model, Model: d.ModelKey, MemoryMib: d.MemoryMiB,
		ComputeCapability: d.ComputeCapability, PciBusId: d.PCIBusID, Kind: kind, Parent: d.Parent, Simulated: d.Simulated,
		Health: d.State, HealthReason: validText(d.Reason),
	}
}

func sampleProto(devices []host.DeviceReading, runs []host.RunReading) *agentv1.SampleResponse {
	out := &agentv1.SampleResponse{}
	for i := range devices {
		out.Devices = append(out.Devices, readingProto(&devices[i]))
	}
	for _, r := range runs {
		out.Runs = append(out.Runs, &agentv1.RunReading{
			Workspace: r.Key.Workspace, Epoch: r.Key.Epoch, Cpu: durationpb.New(r.Usage.CPU), MemoryBytes: r.Usage.MemoryBytes,
		})
	}
	return out
}

// readingProto leaves out what the device does not report or what is not known now.
func readingProto(r *host.DeviceReading) *agentv1.DeviceReading {
	out := &agentv1.DeviceReading{Id: r.UUID, Age: durationpb.New(r.Age)}
	if v, ok := value(r.UtilisationPct); ok {
		n := int32(v)
		out.UtilizationPercent = &n
	}
	if v, ok := value(r.MemoryUsedMiB); ok {
		n := int64(v)
		out.MemoryUsedMib = &n
	}
	if v, ok := value(r.PowerW); ok {
		out.PowerWatts = &v
	}
	if v, ok := value(r.TemperatureC); ok {
		n := int32(v)
		out.TemperatureCelsius = &n
	}
	for _, m := range []gpu.Metric{r.UtilisationPct, r.MemoryUsedMiB} {
		out.Stale = out.Stale || m.State == gpu.Stale || m.State == gpu.Missing
	}
	for _, p := range r.Processes {
		out.Processes = append(out.Processes, processProto(p))
	}
	return out
}

func value(m gpu.Metric) (float64, bool) { return m.Value, m.Known() }

func processProto(p gpu.Process) *agentv1.HostProcess {
	out := &agentv1.HostProcess{Pid: int64(p.PID), Name: validText(p.Name), Graphics: p.Type == gpu.Graphics}
	if p.MemoryMiB != gpu.MemoryUnknown {
		memory := p.MemoryMiB
		out.MemoryMib = &memory
	}
	if k, ok := host.ParseKey(p.Workspace); ok {
		out.Workspace, out.Epoch = k.Workspace, k.Epoch
	}
	return out
}

// validText makes what others wrote fit for a proto string.
func validText(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func validLabels(labels map[string]string) map[string]string {
	out := make(map[string]string, len(labels))
	for name, text := range labels {
		out[validText(name)] = validText(text)
	}
	return out
}
