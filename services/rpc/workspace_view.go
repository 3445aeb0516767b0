package rpc

import (
	"context"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
)

// Progress is what is known of a workspace besides its record, in the gateway's memory.
type Progress interface {
	QueuePlace(id fleet.WorkspaceID) (fleet.Wait, bool)
	Reserved(id fleet.WorkspaceID) []fleet.DeviceID
	Pull(id fleet.WorkspaceID) (fleet.Pull, bool)
	Sample(device fleet.DeviceID) (fleet.Sample, bool)
	UnreachableSince(host fleet.HostID) time.Time
}

// WorkspaceViews reads workspaces with what stands around them.
type WorkspaceViews interface {
	View(ctx context.Context, id fleet.WorkspaceID) (fleet.WorkspaceView, error)
}

// viewer makes wire workspaces.
type viewer struct {
	views    WorkspaceViews
	progress Progress
}

func (v *viewer) workspace(ctx context.Context, id fleet.WorkspaceID) (*carrelv1.Workspace, error) {
	view, err := v.views.View(ctx, id)
	if err != nil {
		return nil, err
	}
	w := view.Workspace
	out := workspaceOnWire(w)
	out.Login = view.OwnerLogin
	out.Run = runOnWire(view.Run, view.HostName)
	if w.State.Placed() {
		fillGranted(out.GetSpec(), view.Run)
	}
	out.Mounts = mountsOnWire(view.Mounts)
	for _, lease := range view.Leases {
		out.Leases = append(out.Leases, leaseOnWire(lease))
	}
	for _, device := range view.Devices {
		wire := deviceOnWire(device)
		wire.Host, wire.User, wire.Workspace = view.HostName, w.OwnerName, w.Name
		if sample, ok := v.progress.Sample(device.ID); ok {
			wire.Sample = sampleOnWire(sample)
		}
		out.Devices = append(out.Devices, wire)
	}
	if w.State.Placed() && view.Run.Host != "" {
		out.HostUnreachableSince = stamp(v.progress.UnreachableSince(view.Run.Host))
	}
	v.addProgress(out, w, view.Run)
	return out, nil
}

// fillGranted puts the sizes that the run was given in place of those that were left to its host.
func fillGranted(spec *carrelv1.WorkspaceSpec, run fleet.Run) {
	grant := func(asked *int64, given int64) {
		if *asked == 0 {
			*asked = given
		}
	}
	grant(&spec.CpuMillis, run.CPUMillis)
	grant(&spec.MemoryMib, run.MemoryMiB)
	grant(&spec.ShmMib, run.ShmMiB)
	grant(&spec.PidsLimit, run.PidsLimit)
}

func (v *viewer) addProgress(out *carrelv1.Workspace, w fleet.Workspace, run fleet.Run) {
	switch w.State {
	case fleet.StateQueued:
		out.Queue = &carrelv1.QueuePlace{Since: stamp(run.QueuedAt), Why: "the next plan looks at it"}
		if wait, ok := v.progress.QueuePlace(w.ID); ok {
			out.Queue.Place, out.Queue.Length, out.Queue.Why = int32(wait.Place), int32(wait.Length), wait.Why
		}
		for _, id := range v.progress.Reserved(w.ID) {
			out.Queue.ReservedDevices = append(out.Queue.ReservedDevices, string(id))
		}
	case fleet.StatePulling:
		out.Pull = &carrelv1.PullProgress{Phase: "looking for the image"}
		if pull, ok := v.progress.Pull(w.ID); ok {
			out.Pull.Phase = "downloading"
			out.Pull.BytesDone, out.Pull.BytesTotal = pull.Done, pull.Total
			if pull.Total > 0 && pull.Done >= pull.Total {
				out.Pull.Phase = "extracting"
			}
		}
	case fleet.StateStarting, fleet.StateRunning, fleet.StateStopping, fleet.StateStopped, fleet.StateFailed, fleet.StateDeleted:
	}
}

// workspaceOnWire converts the record alone.
func workspaceOnWire(w fleet.Workspace) *carrelv1.Workspace {
	return &carrelv1.Workspace{
		Id: string(w.ID), Name: w.Name, Owner: w.OwnerName, Project: w.Project, Spec: specOnWire(w.Spec), Origins: w.Origins,
		State: stateOnWire[w.State], Reason: reasonOnWire(w.Reason), CreatedAt: stamp(w.CreatedAt),
		SshHost: w.SSHHost(), SshPrincipal: w.SSHPrincipal(), Sudo: w.Sudo, ReusedHome: w.ReusedVol, Version: w.Version,
		Pending: pendingFields(w),
	}
}

// pendingFields names what the next run will get differently.
func pendingFields(w fleet.Workspace) []string {
	if !w.State.Live() {
		return nil
	}
	return fleet.SpecDifference(w.Spec, w.Pending)
}

// logText is how an event reads in the log.
func logText(e fleet.Event) string {
	text := string(e.State)
	if e.Code != "" {
		text += " (" + e.Code + ")"
	}
	if e.Message != "" {
		text += ": " + e.Message
	}
	return text
}

// graceOf converts a stop's grace; absent is the deployment's (0).
func graceOf(d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	return durationOf("grace", d, 0)
}

// cutOwner splits OWNER/NAME.
func cutOwner(ref string) (owner, rest string, ok bool) {
	owner, rest, ok = strings.Cut(ref, "/")
	if !ok {
		return "", ref, false
	}
	return owner, rest, true
}

// ownerOf resolves OWNER/NAME for an admin, NAME for everybody. It returns whose workspaces to look through and the rest of the reference.
func ownerOf(ctx context.Context, users interface {
	UserByName(ctx context.Context, name string) (fleet.User, error)
}, actor auth.Actor, ref string,
) (owner fleet.UserID, rest string, err error) {
	name, rest, ok := cutOwner(ref)
	if !ok || name == actor.User.Name {
		return actor.User.ID, rest, nil
	}
	if !actor.Admin() {
		return "", "", fleet.Errorf(fleet.KindForbidden, "only an admin may name another's workspace; yours are named without %s/", name)
	}
	user, err := users.UserByName(ctx, name)
	return user.ID, rest, err
}
