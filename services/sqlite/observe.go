package sqlite

import (
	"context"
	"slices"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// mostEpochJump bounds how far a host's word about a run that is not known here can raise the next epoch of a workspace.
const mostEpochJump = 1_000_000

// Observe records a batch from a host; decide says what each run record makes of its workspace. A batch of an older session is ignored,
// and run records at or below the host's sequence number in its present journal too (Stale). A host speaks of its own runs only.
func (db *DB) Observe(ctx context.Context, obs fleet.Observation, now time.Time, decide func(fleet.Workspace, fleet.Run, fleet.ObservedRun) fleet.Step) (changes fleet.Changes, err error) {
	err = db.record(ctx, now, func(t *tx) error {
		changes = fleet.Changes{}
		o := &observing{t: t, decide: decide, changes: &changes}
		return o.batch(&obs)
	})
	return changes, err
}

// observing is one batch's transaction.
type observing struct {
	t       *tx
	host    fleet.Host
	decide  func(fleet.Workspace, fleet.Run, fleet.ObservedRun) fleet.Step
	changes *fleet.Changes
	touched []fleet.HostID // whose desired state changed
}

func (o *observing) batch(obs *fleet.Observation) error {
	host, err := o.t.host(obs.Host)
	if err != nil {
		return err
	}
	o.host = host
	if obs.Session != host.Session {
		o.changes.Stale = true
		return nil
	}
	if obs.Facts != nil {
		if err := o.facts(obs.Facts); err != nil {
			return err
		}
	}
	fresh := obs.JournalID != host.JournalID || obs.Seq > host.AfterSeq
	o.changes.Stale = !fresh && len(obs.Runs) > 0
	if fresh {
		for _, r := range obs.Runs {
			if err := o.run(&r); err != nil {
				return err
			}
		}
		if err := o.t.exec(`UPDATE host SET after_seq = ?, journal_id = ? WHERE id = ?`, obs.Seq, obs.JournalID, host.ID); err != nil {
			return err
		}
	}
	for _, id := range obs.VolumesRemoved {
		err := o.t.exec(`UPDATE volume SET removed_at = coalesce(removed_at, ?1) WHERE id = ?2 AND host = ?3 AND deleted_at <= ?4`, o.t.now, id, host.ID, o.t.now-fleet.VolumeRetention.Milliseconds())
		if err != nil {
			return err
		}
	}
	if obs.Complete {
		if err := o.endFence(); err != nil {
			return err
		}
	}
	return o.finish()
}

// finish notes that the host answered and gives hosts whose desired state changed a new generation.
func (o *observing) finish() error {
	slices.Sort(o.touched)
	o.changes.Hosts = slices.Compact(o.touched)
	for _, id := range o.changes.Hosts {
		if err := o.t.bumpHost(id); err != nil {
			return err
		}
	}
	return o.t.exec(`UPDATE host SET last_seen = max(coalesce(last_seen, 0), ?) WHERE id = ?`, o.t.now, o.host.ID)
}

// facts records what the host is like. A new set of devices, or an engine that answers again, is a reason to plan.
func (o *observing) facts(f *fleet.HostFacts) error {
	problems, err := o.t.storeDevices(o.host.ID, f.Devices)
	if err != nil {
		return err
	}
	problems = append(slices.Clone(f.Problems), problems...)
	o.changes.Freed = true
	return o.t.exec(`UPDATE host SET boot_id = ?, agent_version = ?, engine_version = ?, os = ?, cpus = ?, memory_mib = ?, reserved_cpu_millis = ?, reserved_memory_mib = ?,
		disk_free_mib = ?, gpu_source = ?, driver_version = ?, cuda_version = ?, problems = ?, unmanaged = ?, clock_skew_ms = ? WHERE id = ?`,
		f.BootID, f.AgentVersion, f.EngineVersion, f.OS, f.CPUs, f.MemoryMiB, f.ReservedCPUMillis, f.ReservedMemoryMiB,
		f.DiskFreeMiB, f.GPUSource, f.DriverVersion, f.CUDAVersion, jsonArg(problems), jsonArg(f.Unmanaged), f.ClockSkew.Milliseconds(), o.host.ID)
}

// run records what the host says of one run.
func (o *observing) run(r *fleet.ObservedRun) error {
	run, err := o.t.run(r.Key)
	if isDamaged(err) {
		o.t.db.log.Error("a run's record cannot be read", "workspace", r.Key.Workspace, "epoch", r.Key.Epoch, "error", err)
		return nil
	}
	if err != nil && !fleet.IsKind(err, fleet.KindNotFound) {
		return err
	}
	if err != nil || run.Host != o.host.ID {
		return o.unknown(r)
	}
	if !run.GoneAt.IsZero() {
		return o.late(&run, r)
	}
	w, err := o.t.workspace(r.Key.Workspace)
	if isDamaged(err) {
		return o.damaged(r)
	}
	if err != nil {
		return err
	}
	return o.step(&w, &run, r, o.decide(w, run, *r))
}

// unknown is a run that is not in this database, or not on this host. It is left alone, and the workspace's next epoch is raised above
// it, so that after a restore from a backup no new container takes its name.
func (o *observing) unknown(r *fleet.ObservedRun) error {
	o.changes.Unknown = append(o.changes.Unknown, r.Key)
	return o.t.exec(`UPDATE workspace SET epoch_floor = ?1 WHERE id = ?2 AND epoch_floor < ?1 AND ?1 > epoch AND ?1 <= max(epoch, epoch_floor) + ?3`,
		r.Key.Epoch, r.Key.Workspace, mostEpochJump)
}

// late is a record of a run that ended here already: nothing of it moves any more. Only whether the host still has something of it is
// noted, since until it does not the run stays named to it as one to stop.
func (o *observing) late(run *fleet.Run, r *fleet.ObservedRun) error {
	n, err := o.t.affect(`UPDATE run SET host_clear = ?1 WHERE workspace = ?2 AND epoch = ?3 AND host_clear <> ?1`, r.Phase == fleet.PhaseGone, run.Key.Workspace, run.Key.Epoch)
	if err != nil {
		return err
	}
	if n > 0 {
		o.touched = append(o.touched, o.host.ID)
	}
	return nil
}

// damaged is a record of a workspace that cannot be read: its devices still become free when nothing holds them.
func (o *observing) damaged(r *fleet.ObservedRun) error {
	o.t.db.log.Error("a workspace's record cannot be read", "workspace", r.Key.Workspace)
	if r.Phase != fleet.PhaseGone {
		return nil
	}
	return o.release(r, r.EndedAt)
}

// release ends a run for good.
func (o *observing) release(r *fleet.ObservedRun, ended time.Time) error {
	if _, err := o.t.finishRun(r.Key, ended); err != nil {
		return err
	}
	if r.Phase == fleet.PhaseGone {
		if err := o.t.exec(`UPDATE run SET host_clear = 1 WHERE workspace = ? AND epoch = ?`, r.Key.Workspace, r.Key.Epoch); err != nil {
			return err
		}
	}
	o.changes.Freed = true
	o.touched = append(o.touched, o.host.ID)
	return nil
}

// endFence lets a fenced host take runs again once it has told all and holds nothing of the runs that were ended without it.
func (o *observing) endFence() error {
	n, err := o.t.affect(`UPDATE host SET fenced = 0 WHERE id = ?1 AND fenced = 1 AND NOT EXISTS (SELECT 1 FROM run WHERE host = ?1 AND host_clear = 0)`, o.host.ID)
	if err != nil || n == 0 {
		return err
	}
	o.changes.Freed = true
	o.t.db.log.Info("a fenced host holds nothing any more and takes runs again", "host", o.host.Name)
	return nil
}
