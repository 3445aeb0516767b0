package sqlite

import (
	"context"
	"fmt"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

const runColumns = `run.workspace, run.epoch, run.host, run.image_digest, run.cpu_millis, run.memory_mib, run.shm_mib, run.pids_limit,
	run.queued_at, run.placed_at, run.started_at, run.ready_at, run.ended_at, run.gone_at, run.goal, run.goal_reason, run.stop_grace_ms, run.container_id, run.reason`

func runInto(r *fleet.Run) []any {
	return []any{
		&r.Key.Workspace, &r.Key.Epoch,
		textInto[fleet.HostID]{&r.Host},
		&r.ImageDigest, &r.CPUMillis, &r.MemoryMiB, &r.ShmMiB, &r.PidsLimit,
		timeInto{&r.QueuedAt},
		timeInto{&r.PlacedAt},
		timeInto{&r.StartedAt},
		timeInto{&r.ReadyAt},
		timeInto{&r.EndedAt},
		timeInto{&r.GoneAt},
		&r.Goal, &r.GoalReason,
		durationInto{&r.StopGrace},
		&r.ContainerID,
		jsonInto{&r.Reason},
	}
}

func scanRun(s scanner) (fleet.Run, error) { return scanWith(runInto)(s) }

// Run returns one run. KindNotFound.
func (db *DB) Run(ctx context.Context, key fleet.RunKey) (r fleet.Run, err error) {
	err = db.read(ctx, func(t *tx) error {
		r, err = t.run(key)
		return err
	})
	return r, err
}

// run returns one with the devices that it holds or held.
func (t *tx) run(key fleet.RunKey) (fleet.Run, error) {
	r, err := scanRun(t.row(`SELECT `+runColumns+` FROM run WHERE workspace = ? AND epoch = ?`, key.Workspace, key.Epoch))
	if isNoRows(err) {
		return r, fleet.Errorf(fleet.KindNotFound, "there is no run %d of workspace %s", key.Epoch, clip(string(key.Workspace)))
	}
	if err != nil {
		return r, err
	}
	r.Devices, err = all(t, scanString[fleet.DeviceID], `SELECT device FROM lease WHERE workspace = ? AND epoch = ? ORDER BY id`, key.Workspace, key.Epoch)
	return r, err
}

// queueRun makes the next run of a workspace, waiting for a place. The workspace is changed and must be stored by the caller.
func (t *tx) queueRun(w *fleet.Workspace, submitted int64, missing missingVolumes) error {
	home, grace, err := t.home(w.ID)
	if err != nil {
		return err
	}
	var floor int64
	if err := t.row(`SELECT epoch_floor FROM workspace WHERE id = ?`, w.ID).Scan(&floor); err != nil {
		return err
	}
	w.Epoch = max(w.Epoch, floor) + 1
	w.Spec = w.Pending
	w.State, w.Goal, w.Restart, w.Reason = fleet.StateQueued, fleet.GoalRunning, false, fleet.Reason{}
	err = t.exec(`INSERT INTO run (workspace, epoch, gpus, image_digest, cpu_millis, memory_mib, shm_mib, pids_limit, submitted_at, queued_at,
		ended_unattested, host_clear, goal, goal_reason, stop_grace_ms, container_id, reason) VALUES (?, ?, ?, ?, 0, 0, 0, 0, ?, ?, 0, 1, 'running', '', ?, '', '{}')`,
		w.ID, w.Epoch, w.Spec.GPU.Count, w.Spec.ImageDigest, submitted, t.now, grace.Milliseconds())
	if err != nil {
		return fmt.Errorf("queue run %d of %s: %w", w.Epoch, w.ID, err)
	}
	return t.layMounts(w, w.Epoch, home, &w.Spec, missing)
}

// dropRun ends a run that was never placed: it has waited, and has no device time.
func (t *tx) dropRun(key fleet.RunKey, reason fleet.Reason) error {
	err := t.exec(`UPDATE run SET gone_at = ?1, ended_at = ?1, goal = 'stopped', reason = ?2, host_clear = 1 WHERE workspace = ?3 AND epoch = ?4 AND placed_at IS NULL AND gone_at IS NULL`,
		t.now, jsonArg(reason), key.Workspace, key.Epoch)
	if err != nil {
		return err
	}
	return t.exec(`DELETE FROM reservation WHERE workspace = ? AND epoch = ?`, key.Workspace, key.Epoch)
}

// finishRun records that nothing of a run can hold its devices any more: ends and releases its leases and gives its volumes back.
func (t *tx) finishRun(key fleet.RunKey, ended time.Time) (leases int, err error) {
	if leases, err = t.endLeases(key, ended); err != nil {
		return 0, err
	}
	err = t.exec(`UPDATE run SET gone_at = ?1, ended_at = coalesce(ended_at, min(max(?2, placed_at), ?1)), goal = 'stopped' WHERE workspace = ?3 AND epoch = ?4 AND gone_at IS NULL`,
		t.now, t.orNow(ended), key.Workspace, key.Epoch)
	if err != nil {
		return 0, err
	}
	return leases, t.closeMounts(key)
}

func (t *tx) orNow(at time.Time) int64 {
	if at.IsZero() {
		return t.now
	}
	return millis(at)
}
