package sqlite

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Commit carries out a plan in one transaction that checks each placement again. One that no longer holds is dropped, and the others
// are carried out. Reservations replace those before. A plan that changes nothing writes nothing.
func (db *DB) Commit(ctx context.Context, plan fleet.Plan, now time.Time) (done fleet.Committed, err error) {
	if len(plan.Placements) == 0 {
		same, err := db.sameReservations(ctx, plan.Reservations)
		if err != nil || same {
			return done, err
		}
	}
	done, err = db.commitPlan(ctx, &plan, now, false)
	if errors.Is(err, errPartly) {
		done, err = db.commitPlan(ctx, &plan, now, true)
	}
	return done, err
}

// errPartly is a placement that failed after its first change, which its checks should have kept from happening.
var errPartly = errors.New("a placement failed half-way")

// commitPlan carries out a plan. Undoing single placements needs a savepoint around each, which makes a transaction of many slow; so they
// are careful only where a placement passed its checks and failed all the same.
func (db *DB) commitPlan(ctx context.Context, plan *fleet.Plan, now time.Time, careful bool) (done fleet.Committed, err error) {
	err = db.write(ctx, now, func(t *tx) error {
		done = fleet.Committed{}
		c := &committing{t: t, careful: careful, hosts: map[fleet.HostID]*hostRoom{}, held: map[fleet.UserID]int{}}
		for _, p := range plan.Placements {
			err := c.place(&p)
			switch {
			case err == nil:
				c.take(&p)
				done.Placed = append(done.Placed, p)
				done.Changed = append(done.Changed, p.Run.Workspace)
			case fleet.KindOf(err) != fleet.KindInternal:
				db.log.Info("a placement no longer holds", "workspace", p.Run.Workspace, "epoch", p.Run.Epoch, "host", p.Host, "reason", fleet.UserMessage(err))
				done.Dropped = append(done.Dropped, p.Run)
			default:
				return fmt.Errorf("place run %d of %s: %w", p.Run.Epoch, p.Run.Workspace, err)
			}
		}
		done.Hosts = slices.Sorted(maps.Keys(c.changed()))
		for _, host := range done.Hosts {
			if err := t.bumpHost(host); err != nil {
				return err
			}
		}
		return t.storeReservations(plan.Reservations)
	})
	return done, err
}

func (db *DB) sameReservations(ctx context.Context, want []fleet.Reservation) (same bool, err error) {
	err = db.read(ctx, func(t *tx) error {
		have, err := t.reservations()
		byRun := func(list []fleet.Reservation) map[fleet.RunKey]string {
			m := map[fleet.RunKey]string{}
			for _, r := range list {
				m[r.Run] = jsonArg([]any{r.Host, r.Devices, millis(r.Since)})
			}
			return m
		}
		same = maps.Equal(byRun(have), byRun(want))
		return err
	})
	return same, err
}

func (t *tx) storeReservations(list []fleet.Reservation) error {
	if err := t.exec(`DELETE FROM reservation`); err != nil {
		return err
	}
	for _, r := range list {
		err := t.exec(`INSERT INTO reservation (workspace, epoch, host, devices, since) SELECT ?1, ?2, ?3, ?4, ?5
			WHERE EXISTS (SELECT 1 FROM run WHERE workspace = ?1 AND epoch = ?2 AND placed_at IS NULL AND gone_at IS NULL)`,
			r.Run.Workspace, r.Run.Epoch, r.Host, jsonArg(r.Devices), millis(r.Since))
		if err != nil {
			return err
		}
	}
	return nil
}

// hostRoom is what a host has left, as the transaction goes on.
type hostRoom struct {
	host      fleet.Host
	left      room
	unmanaged map[fleet.DeviceID]bool
	used      bool // something was placed
}

// committing is a plan's transaction.
type committing struct {
	t       *tx
	careful bool
	hosts   map[fleet.HostID]*hostRoom
	held    map[fleet.UserID]int
}

func (c *committing) changed() map[fleet.HostID]bool {
	used := map[fleet.HostID]bool{}
	for id, h := range c.hosts {
		if h.used {
			used[id] = true
		}
	}
	return used
}

// placing is one placement with what it is checked against.
type placing struct {
	key     fleet.RunKey
	host    fleet.HostID
	owner   fleet.UserID
	project string
	pool    string
}

// place checks a placement and carries it out.
func (c *committing) place(p *fleet.Placement) error {
	w, err := c.waiting(p.Run)
	if err != nil {
		return err
	}
	h, err := c.check(&w, p)
	if err != nil {
		return err
	}
	before := w
	w.State, w.Reason = fleet.StatePulling, fleet.Reason{} // the table leads from pulling to starting, not back
	if w.Origins == nil && len(p.Origins) > 0 {
		w.Origins = map[string]string{}
	}
	maps.Copy(w.Origins, p.Origins)
	if err := c.carryOut(&w, h.host.Pool, p); err != nil {
		return err
	}
	if _, ok := c.held[w.Owner]; ok {
		c.held[w.Owner] += len(p.Devices)
	}
	return c.t.storeWorkspace(&before, &w)
}

// waiting returns the workspace of a run that still waits for its place.
func (c *committing) waiting(key fleet.RunKey) (fleet.Workspace, error) {
	w, err := c.t.workspace(key.Workspace)
	if err != nil {
		return w, err
	}
	var placed, gone time.Time
	err = c.t.row(`SELECT placed_at, gone_at FROM run WHERE workspace = ? AND epoch = ?`, key.Workspace, key.Epoch).Scan(timeInto{&placed}, timeInto{&gone})
	if err != nil && !isNoRows(err) {
		return w, err
	}
	if err != nil || w.State != fleet.StateQueued || w.Epoch != key.Epoch || !placed.IsZero() || !gone.IsZero() {
		return w, fleet.Errorf(fleet.KindConflict, "it does not wait any more")
	}
	return w, nil
}

// check holds a placement against all that bounds it and returns its host's room.
func (c *committing) check(w *fleet.Workspace, p *fleet.Placement) (*hostRoom, error) {
	h, err := c.room(p.Host)
	if err != nil {
		return nil, err
	}
	if err := c.checkHost(h, w, p); err != nil {
		return nil, err
	}
	if err := c.checkDevices(h, w, p); err != nil {
		return nil, err
	}
	return h, c.checkQuota(w, len(p.Devices))
}

// carryOut writes a placement. Where one that fails would leave a part behind, the whole plan is begun again with care.
func (c *committing) carryOut(w *fleet.Workspace, pool string, p *fleet.Placement) error {
	volumes, err := c.t.checkMounts(p.Run, p.Host)
	if err != nil {
		return err
	}
	write := func() error { return c.t.carryOut(w, pool, p, volumes) }
	if c.careful {
		return c.t.attempt(write)
	}
	err = write()
	if err == nil || fleet.KindOf(err) == fleet.KindInternal {
		return err
	}
	return fmt.Errorf("%w: %w", errPartly, errors.New(err.Error()))
}

// take counts what a placement uses against those that follow.
func (c *committing) take(p *fleet.Placement) {
	h := c.hosts[p.Host]
	h.left.cpuMillis -= p.CPUMillis
	h.left.memoryMiB -= p.MemoryMiB
	h.used = true
}

func (c *committing) room(id fleet.HostID) (*hostRoom, error) {
	if h, ok := c.hosts[id]; ok {
		return h, nil
	}
	host, err := c.t.host(id)
	if err != nil {
		return nil, err
	}
	h := &hostRoom{host: host, left: offered(&host), unmanaged: map[fleet.DeviceID]bool{}}
	var used room
	err = c.t.row(`SELECT coalesce(sum(cpu_millis), 0), coalesce(sum(memory_mib), 0) FROM run WHERE host = ? AND gone_at IS NULL`, id).Scan(&used.cpuMillis, &used.memoryMiB)
	if err != nil {
		return nil, err
	}
	h.left.cpuMillis -= used.cpuMillis
	h.left.memoryMiB -= used.memoryMiB
	for _, u := range host.Unmanaged {
		for _, d := range u.Devices {
			h.unmanaged[d] = true
		}
	}
	c.hosts[id] = h
	return h, nil
}

// checkHost holds a placement against its host. What is kept for runs without devices is the plan's affair; that the host is not
// promised twice is checked here.
func (c *committing) checkHost(h *hostRoom, w *fleet.Workspace, p *fleet.Placement) error {
	switch {
	case h.host.Fenced || h.host.Draining:
		return fleet.Errorf(fleet.KindConflict, "host %s takes no runs now", h.host.Name)
	case w.Spec.Pool != "" && w.Spec.Pool != h.host.Pool:
		return fleet.Errorf(fleet.KindConflict, "host %s is not in pool %s", h.host.Name, w.Spec.Pool)
	case w.Spec.ImageHost != "" && w.Spec.ImageHost != p.Host:
		return fleet.Errorf(fleet.KindConflict, "the image is not on host %s", h.host.Name)
	case p.CPUMillis < 0 || p.MemoryMiB < 0 || p.CPUMillis > h.left.cpuMillis || p.MemoryMiB > h.left.memoryMiB:
		return fleet.Errorf(fleet.KindConflict, "host %s has %d millicores and %d MiB left; %d and %d are needed", h.host.Name, h.left.cpuMillis, h.left.memoryMiB, p.CPUMillis, p.MemoryMiB)
	}
	return nil
}

func (c *committing) checkDevices(h *hostRoom, w *fleet.Workspace, p *fleet.Placement) error {
	if len(p.Devices) != w.Spec.GPU.Count {
		return fleet.Errorf(fleet.KindConflict, "%d devices are planned and %d asked for", len(p.Devices), w.Spec.GPU.Count)
	}
	for i, id := range p.Devices {
		var d fleet.Device
		var held bool
		err := c.t.row(`SELECT id, host, model, kind, present, health, health_reason, excluded, excluded_reason,
			EXISTS (SELECT 1 FROM lease WHERE lease.device = device.id AND lease.released_at IS NULL) FROM device WHERE id = ?`, id).
			Scan(&d.ID, &d.Host, &d.Model, &d.Kind, &d.Present, &d.Health, &d.HealthReason, &d.Excluded, &d.ExcludedReason, &held)
		if isNoRows(err) {
			return fleet.Errorf(fleet.KindConflict, "there is no device %s", id)
		}
		if err != nil {
			return err
		}
		ok, why := d.Leasable()
		switch {
		case slices.Contains(p.Devices[:i], id) || d.Host != p.Host:
			return fleet.Errorf(fleet.KindConflict, "device %s is planned twice or is not on host %s", id, h.host.Name)
		case !ok:
			return fleet.Errorf(fleet.KindConflict, "device %s cannot be leased: %s", id, why)
		case held || h.unmanaged[id]:
			return fleet.Errorf(fleet.KindConflict, "device %s is in use", id)
		case len(w.Spec.GPU.Models) > 0 && !slices.Contains(w.Spec.GPU.Models, d.Model):
			return fleet.Errorf(fleet.KindConflict, "device %s is a %s, which was not asked for", id, d.Model)
		}
	}
	return nil
}

// checkQuota holds the owner's devices against the limit.
func (c *committing) checkQuota(w *fleet.Workspace, devices int) error {
	if devices == 0 {
		return nil
	}
	var own *int
	var most int
	err := c.t.row(`SELECT user.gpu_limit, coalesce((SELECT max_gpus_per_workspace FROM pool WHERE name = ?), 0) FROM user WHERE id = ?`, w.Spec.Pool, w.Owner).Scan(&own, &most)
	if err != nil {
		return err
	}
	if most > 0 && devices > most {
		return fleet.Errorf(fleet.KindConflict, "pool %s gives at most %d devices to a workspace", w.Spec.Pool, most)
	}
	limit := c.t.db.gpuLimit(own)
	if limit < 0 {
		return nil
	}
	if _, ok := c.held[w.Owner]; !ok {
		var held int
		if err := c.t.row(`SELECT count(*) FROM lease WHERE user = ? AND released_at IS NULL`, w.Owner).Scan(&held); err != nil {
			return err
		}
		c.held[w.Owner] = held
	}
	if held := c.held[w.Owner]; held+devices > limit {
		return fleet.Errorf(fleet.KindConflict, "%s holds %d of at most %d devices", w.OwnerName, held, limit)
	}
	return nil
}

// carryOut gives a waiting run its place: sizes, leases with their facts, volumes.
func (t *tx) carryOut(w *fleet.Workspace, pool string, p *fleet.Placement, volumes []fleet.VolumeID) error {
	n, err := t.affect(`UPDATE run SET host = ?, cpu_millis = ?, memory_mib = ?, shm_mib = ?, pids_limit = ?, placed_at = ?, goal = 'running', host_clear = 0
		WHERE workspace = ? AND epoch = ? AND placed_at IS NULL AND gone_at IS NULL`,
		p.Host, p.CPUMillis, p.MemoryMiB, p.ShmMiB, p.PidsLimit, t.now, p.Run.Workspace, p.Run.Epoch)
	if err != nil {
		return err
	}
	if n != 1 {
		return fleet.Errorf(fleet.KindConflict, "it does not wait any more")
	}
	if err := t.openMounts(p.Run, p.Host, volumes); err != nil {
		return err
	}
	placing := &placing{key: p.Run, host: p.Host, owner: w.Owner, project: w.Project, pool: pool}
	for _, device := range p.Devices {
		if err := t.openLease(device, placing); err != nil {
			return err
		}
	}
	return nil
}
