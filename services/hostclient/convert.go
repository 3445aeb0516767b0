package hostclient

import (
	"fmt"
	"maps"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
	"github.com/carrel-dev/carrel/services/fleet"
)

// applyRequest writes a host's desired state for its agent.
func (c *Client) applyRequest(d fleet.DesiredHost) (*agentv1.ApplyRequest, error) {
	out := &agentv1.ApplyRequest{
		Stamp:      &agentv1.Stamp{DatabaseGeneration: d.Stamp.DatabaseGeneration, HostSession: d.Stamp.HostSession, Generation: d.Stamp.Generation},
		Deployment: c.set.Deployment,
	}
	for i := range d.Runs {
		r, err := c.desiredRun(&d.Runs[i])
		if err != nil {
			return nil, err
		}
		out.Runs = append(out.Runs, r)
	}
	for _, v := range d.VolumesGone {
		out.VolumesGone = append(out.VolumesGone, string(v))
	}
	for _, id := range d.Excluded {
		out.ExcludedDevices = append(out.ExcludedDevices, string(id))
	}
	return out, nil
}

func (c *Client) desiredRun(d *fleet.DesiredRun) (*agentv1.DesiredRun, error) {
	w, run := &d.Workspace, &d.Run
	out := &agentv1.DesiredRun{
		Workspace: string(run.Key.Workspace), Epoch: run.Key.Epoch, Name: w.Name, Owner: d.Owner.Name, Desired: agentv1.DesiredState_DESIRED_STATE_RUNNING,
		StopGrace: durationpb.New(run.StopGrace), Reason: run.GoalReason, Project: w.Project, Pool: w.Spec.Pool,
	}
	if run.Goal != fleet.GoalRunning { // an ended run needs no secret and no mount
		out.Desired = agentv1.DesiredState_DESIRED_STATE_GONE
		return out, nil
	}
	key, certificate, err := c.identities.SSHIdentity(*w)
	if err != nil {
		return nil, fmt.Errorf("ssh identity of workspace %s: %w", w.ID, err)
	}
	out.Ssh = &agentv1.SshIdentity{HostKey: key, HostCertificate: certificate}
	for _, k := range d.Keys {
		out.Ssh.AuthorizedKeys = append(out.Ssh.AuthorizedKeys, k.PublicKey)
	}
	out.ImageReference, out.ImageDigest = w.Spec.Image, run.ImageDigest
	out.CpuMillis, out.MemoryMib, out.ShmMib, out.PidsLimit = run.CPUMillis, run.MemoryMiB, run.ShmMiB, run.PidsLimit
	out.Env, out.Sudo = maps.Clone(w.Spec.Env), d.PoolSudo
	out.Identity = &agentv1.Identity{Login: d.Owner.Login, Uid: d.Owner.UID, Gid: d.Owner.GID}
	for _, g := range d.Owner.Groups {
		out.Identity.Groups = append(out.Identity.Groups, &agentv1.Group{Name: g.Name, Gid: g.GID})
	}
	for _, id := range run.Devices {
		out.Devices = append(out.Devices, &agentv1.DeviceGrant{Id: string(id), Simulated: d.Simulated[id]})
	}
	out.Mounts = mounts(d.Mounts)
	return out, nil
}

// mounts puts the home first.
func mounts(in []fleet.Mount) []*agentv1.Mount {
	var home, rest []*agentv1.Mount
	for _, m := range in {
		out := &agentv1.Mount{
			Kind: agentv1.MountKind_MOUNT_KIND_LOCAL, VolumeId: string(m.Volume), HostPath: m.HostPath, Target: m.Target,
			ReadOnly: m.ReadOnly, Home: m.Home, Name: m.Name, Public: m.Public,
		}
		if m.Volume == "" {
			out.Kind = agentv1.MountKind_MOUNT_KIND_DECLARED
		}
		if m.Home {
			home = append(home, out)
		} else {
			rest = append(rest, out)
		}
	}
	return append(home, rest...)
}

// observation puts a batch onto the gateway's time line: ages are counted back from now.
func (c *Client) observation(host fleet.HostID, m *agentv1.ObserveResponse) fleet.Observation {
	now := c.now()
	out := fleet.Observation{Host: host, JournalID: m.GetJournalId(), Seq: m.GetSeq(), Complete: m.GetComplete()}
	if m.GetFacts() != nil {
		out.Facts = facts(m.GetFacts(), now)
	}
	for _, r := range m.GetRuns() {
		out.Runs = append(out.Runs, observedRun(r, now))
	}
	for _, v := range m.GetVolumesRemoved() {
		out.VolumesRemoved = append(out.VolumesRemoved, fleet.VolumeID(v))
	}
	return out
}

// ago returns the time that lies an age back; zero when there is none. A negative age is the host's mistake and counts as now.
func ago(now time.Time, age *durationpb.Duration) time.Time {
	if age == nil {
		return time.Time{}
	}
	return now.Add(-max(0, age.AsDuration()))
}

var phases = map[agentv1.RunPhase]fleet.Phase{
	agentv1.RunPhase_RUN_PHASE_PULLING:  fleet.PhasePulling,
	agentv1.RunPhase_RUN_PHASE_STARTING: fleet.PhaseStarting,
	agentv1.RunPhase_RUN_PHASE_READY:    fleet.PhaseReady,
	agentv1.RunPhase_RUN_PHASE_STOPPING: fleet.PhaseStopping,
	agentv1.RunPhase_RUN_PHASE_GONE:     fleet.PhaseGone,
}

func observedRun(r *agentv1.ObservedRun, now time.Time) fleet.ObservedRun {
	out := fleet.ObservedRun{
		Key: fleet.RunKey{Workspace: fleet.WorkspaceID(r.GetWorkspace()), Epoch: r.GetEpoch()}, Phase: phases[r.GetPhase()], ContainerID: r.GetContainerId(),
		StartedAt: ago(now, r.GetStartedAge()), ReadyAt: ago(now, r.GetReadyAge()), EndedAt: ago(now, r.GetEndedAge()), EndedUnattested: r.GetEndedUnattested(),
		Reason:      fleet.Reason{Code: r.GetReasonCode(), Message: r.GetReasonMessage(), LogTail: r.GetLogTail()},
		OutOfMemory: r.GetOutOfMemory(), PullDone: r.GetPullBytesDone(), PullTotal: r.GetPullBytesTotal(), Sudo: r.GetSudo(),
		ImageDigest: r.GetImageDigest(), EngineSilent: r.GetEngineSilent().AsDuration(),
	}
	if r.ExitCode != nil {
		code := int(r.GetExitCode())
		out.Reason.ExitCode = &code
	}
	return out
}

func facts(f *agentv1.HostFacts, now time.Time) *fleet.HostFacts {
	out := &fleet.HostFacts{
		BootID: f.GetBootId(), AgentVersion: f.GetAgentVersion(), EngineVersion: f.GetEngineVersion(), OS: f.GetOs(), CPUs: int(f.GetCpus()),
		MemoryMiB: f.GetMemoryMib(), DiskFreeMiB: f.GetDiskFreeMib(), ReservedCPUMillis: f.GetReservedCpuMillis(), ReservedMemoryMiB: f.GetReservedMemoryMib(),
		GPUSource: f.GetGpuSource(), DriverVersion: f.GetDriverVersion(), CUDAVersion: f.GetCudaVersion(), Problems: f.GetProblems(),
	}
	if f.GetClock() != nil {
		out.ClockSkew = f.GetClock().AsTime().Sub(now)
	}
	for _, d := range f.GetDevices() {
		out.Devices = append(out.Devices, fleet.Device{
			ID: fleet.DeviceID(d.GetId()), Index: int(d.GetIndex()), Product: d.GetProduct(), Model: d.GetModel(), MemoryMiB: d.GetMemoryMib(),
			ComputeCapability: d.GetComputeCapability(), PCIBusID: d.GetPciBusId(), Kind: fleet.DeviceKind(d.GetKind()), Parent: fleet.DeviceID(d.GetParent()),
			Simulated: d.GetSimulated(), Present: true, Health: d.GetHealth(), HealthReason: d.GetHealthReason(),
		})
	}
	for _, u := range f.GetUnmanaged() {
		container := fleet.Unmanaged{Name: u.GetName(), Run: fleet.RunKey{Workspace: fleet.WorkspaceID(u.GetWorkspace()), Epoch: u.GetEpoch()}, Running: u.GetRunning()}
		for _, id := range u.GetDevices() {
			container.Devices = append(container.Devices, fleet.DeviceID(id))
		}
		out.Unmanaged = append(out.Unmanaged, container)
	}
	return out
}

func samples(readings []*agentv1.DeviceReading, now time.Time) []fleet.Sample {
	out := make([]fleet.Sample, 0, len(readings))
	for _, r := range readings {
		s := fleet.Sample{Device: fleet.DeviceID(r.GetId()), At: ago(now, r.GetAge()), MemoryUsedMiB: r.MemoryUsedMib, PowerWatts: r.PowerWatts, Stale: r.GetStale()}
		if s.At.IsZero() {
			s.At = now
		}
		s.UtilizationPercent, s.TemperatureCelsius = number(r.UtilizationPercent), number(r.TemperatureCelsius)
		for _, p := range r.GetProcesses() {
			s.Processes = append(s.Processes, fleet.Process{
				PID: p.GetPid(), Name: p.GetName(), MemoryMiB: p.MemoryMib, Graphics: p.GetGraphics(), Run: fleet.RunKey{Workspace: fleet.WorkspaceID(p.GetWorkspace()), Epoch: p.GetEpoch()},
			})
		}
		out = append(out, s)
	}
	return out
}

func number(n *int32) *int {
	if n == nil {
		return nil
	}
	out := int(*n)
	return &out
}
