package sqlite

import (
	"cmp"
	"context"
	"fmt"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Snapshot returns what the scheduler decides on, from one read transaction. connected says which hosts answer now.
//
// HostView: CPUMillis and MemoryMiB are what runs with devices share; CPUOnlyReserve is kept for runs without devices beside it. A host
// without devices offers all to those, and its reserve is the whole.
func (db *DB) Snapshot(ctx context.Context, connected func(fleet.HostID) bool) (s fleet.Snapshot, err error) {
	err = db.read(ctx, func(t *tx) error {
		s = fleet.Snapshot{Held: map[fleet.UserID]int{}}
		hosts, err := all(t, scanHost, `SELECT `+hostColumns+` FROM host ORDER BY name`)
		if err != nil {
			return err
		}
		if s.Hosts, err = t.hostViews(hosts, connected); err != nil {
			return err
		}
		if s.Waiting, err = t.waiting(); err != nil {
			return err
		}
		if s.Reservations, err = t.reservations(); err != nil {
			return err
		}
		return each(t, func(row scanner) error {
			var user fleet.UserID
			var held int
			err := row.Scan(&user, &held)
			s.Held[user] = held
			return err
		}, `SELECT user, count(*) FROM lease WHERE released_at IS NULL GROUP BY user`)
	})
	return s, err
}

// room is what a host's runs use.
type room struct{ cpuMillis, memoryMiB int64 }

// usedRoom is what runs that are not gone use: those with devices, and those without.
func (t *tx) usedRoom() (gpu, cpuOnly map[fleet.HostID]room, err error) {
	gpu, cpuOnly = map[fleet.HostID]room{}, map[fleet.HostID]room{}
	err = each(t, func(row scanner) error {
		var host fleet.HostID
		var withDevices bool
		var r room
		err := row.Scan(&host, &withDevices, &r.cpuMillis, &r.memoryMiB)
		if withDevices {
			gpu[host] = r
		} else {
			cpuOnly[host] = r
		}
		return err
	}, `SELECT host, gpus > 0, sum(cpu_millis), sum(memory_mib) FROM run WHERE gone_at IS NULL AND host IS NOT NULL GROUP BY host, gpus > 0`)
	return gpu, cpuOnly, err
}

func (t *tx) hostViews(hosts []fleet.Host, connected func(fleet.HostID) bool) ([]fleet.HostView, error) {
	gpu, cpuOnly, err := t.usedRoom()
	if err != nil {
		return nil, err
	}
	devices, err := t.deviceViews(hosts)
	if err != nil {
		return nil, err
	}
	views := make([]fleet.HostView, 0, len(hosts))
	for i := range hosts {
		h := &hosts[i]
		v := fleet.HostView{
			ID: h.ID, Name: h.Name, Pool: h.Pool, DiskFreeMiB: h.DiskFreeMiB, CUDAVersion: h.CUDAVersion, DriverVersion: h.DriverVersion,
			GPUSource: h.GPUSource, Devices: devices[h.ID],
		}
		v.Usable, v.Why = usable(h, connected)
		for _, d := range v.Devices {
			if d.Leasable {
				v.LeasableDevices++
			}
		}
		t.shareRoom(&v, h, gpu[h.ID], cpuOnly[h.ID])
		views = append(views, v)
	}
	return views, nil
}

func usable(h *fleet.Host, connected func(fleet.HostID) bool) (bool, string) {
	switch {
	case h.Fenced:
		return false, "fenced"
	case !connected(h.ID):
		return false, "does not answer"
	case h.Draining:
		return false, "draining"
	case h.EngineVersion == "":
		return false, "its container engine does not answer"
	}
	return true, ""
}

// offered is what a host has for workspaces.
func offered(h *fleet.Host) room {
	return room{max(int64(h.CPUs)*1000-h.ReservedCPUMillis, 0), max(h.MemoryMiB-h.ReservedMemoryMiB, 0)}
}

// What a small GPU host keeps for runs without devices, where the share in percent would be too little to work with: one core and
// 4 GiB, but not more than half of its cores and a quarter of its memory.
const (
	smallCPUReserve    = 1000 // thousandths of a core
	smallMemoryReserve = 4096 // MiB
)

func (t *tx) shareRoom(v *fleet.HostView, h *fleet.Host, gpu, cpuOnly room) {
	all := offered(h)
	if len(v.Devices) == 0 {
		v.CPUMillis, v.MemoryMiB = all.cpuMillis, all.memoryMiB
		v.CPUOnlyReserve, v.MemOnlyReserve = all.cpuMillis, all.memoryMiB
		v.FreeCPUMillis = max(all.cpuMillis-gpu.cpuMillis-cpuOnly.cpuMillis, 0)
		v.FreeMemoryMiB = max(all.memoryMiB-gpu.memoryMiB-cpuOnly.memoryMiB, 0)
		v.FreeCPUOnly, v.FreeMemoryOnly = v.FreeCPUMillis, v.FreeMemoryMiB
		return
	}
	if percent := int64(t.db.opts.CPUOnlyPercent); percent > 0 {
		v.CPUOnlyReserve = max(all.cpuMillis*percent/100, min(smallCPUReserve, all.cpuMillis/2))
		v.MemOnlyReserve = max(all.memoryMiB*percent/100, min(smallMemoryReserve, all.memoryMiB/4))
	}
	v.CPUMillis, v.MemoryMiB = all.cpuMillis-v.CPUOnlyReserve, all.memoryMiB-v.MemOnlyReserve
	v.FreeCPUMillis, v.FreeMemoryMiB = max(v.CPUMillis-gpu.cpuMillis, 0), max(v.MemoryMiB-gpu.memoryMiB, 0)
	v.FreeCPUOnly, v.FreeMemoryOnly = max(v.CPUOnlyReserve-cpuOnly.cpuMillis, 0), max(v.MemOnlyReserve-cpuOnly.memoryMiB, 0)
}

// deviceViews tells of each device whether it is free: leasable, not leased, neither its parts nor its whole leased, and not named by a
// container on its host that nobody here asked for.
func (t *tx) deviceViews(hosts []fleet.Host) (map[fleet.HostID][]fleet.DeviceView, error) {
	unmanaged := map[fleet.DeviceID]string{}
	for _, h := range hosts {
		for _, u := range h.Unmanaged {
			for _, d := range u.Devices {
				unmanaged[d] = u.Name
			}
		}
	}
	held, partHeld := map[fleet.DeviceID]string{}, map[fleet.DeviceID]string{}
	err := each(t, func(row scanner) error {
		var device, parent fleet.DeviceID
		var holder string
		err := row.Scan(&device, &parent, &holder)
		held[device] = holder
		if parent != "" {
			partHeld[parent] = holder
		}
		return err
	}, `SELECT lease.device, device.parent, user.name || '/' || workspace.name FROM lease JOIN device ON device.id = lease.device
		JOIN user ON user.id = lease.user JOIN workspace ON workspace.id = lease.workspace WHERE lease.released_at IS NULL`)
	if err != nil {
		return nil, err
	}
	views := map[fleet.HostID][]fleet.DeviceView{}
	err = each(t, func(row scanner) error {
		d, err := scanDevice(row)
		if err != nil {
			return err
		}
		v := fleet.DeviceView{ID: d.ID, Model: d.Model, MemoryMiB: d.MemoryMiB, ComputeCapability: d.ComputeCapability, HeldBy: held[d.ID]}
		v.NoShare = !d.Present || d.Kind == fleet.KindMIGParent
		v.Leasable, v.Why = d.Offered()
		v.HeldBy = cmp.Or(v.HeldBy, partHeld[d.ID], held[d.Parent])
		if name, ok := unmanaged[d.ID]; ok && v.HeldBy == "" {
			v.Why = fmt.Sprintf("used by container %s, which nobody here asked for", name)
		}
		v.Free = v.Leasable && v.HeldBy == "" && unmanaged[d.ID] == ""
		views[d.Host] = append(views[d.Host], v)
		return nil
	}, `SELECT `+deviceColumns+` FROM device ORDER BY host, ordinal, id`)
	return views, err
}

// waiting returns the runs that wait, in order of first submission. One whose record cannot be read is left out.
func (t *tx) waiting() ([]fleet.Request, error) {
	var list []fleet.Request
	index := map[fleet.RunKey]int{}
	err := each(t, func(row scanner) error {
		var r fleet.Request
		var limit *int
		err := row.Scan(&r.Run.Workspace, &r.Run.Epoch, timeInto{&r.SubmittedAt}, &r.Name, &r.User, &r.UserName, &limit, jsonInto{&r.Spec})
		if isDamaged(err) {
			t.db.log.Error("a waiting workspace's record cannot be read", "workspace", r.Run.Workspace, "error", err)
			return nil
		}
		r.GPULimit = t.db.gpuLimit(limit)
		index[r.Run] = len(list)
		list = append(list, r)
		return err
	}, `SELECT run.workspace, run.epoch, run.submitted_at, workspace.name, owner.id, owner.name, owner.gpu_limit, workspace.spec
		FROM run JOIN workspace ON workspace.id = run.workspace JOIN user AS owner ON owner.id = workspace.owner
		WHERE run.placed_at IS NULL AND run.gone_at IS NULL AND workspace.state = 'queued' AND workspace.epoch = run.epoch
		ORDER BY run.submitted_at, run.workspace`)
	if err != nil || len(list) == 0 {
		return list, err
	}
	return list, t.whereVolumesLie(list, index)
}

// gpuLimit is a user's limit, or the deployment's; negative means none.
func (db *DB) gpuLimit(own *int) int {
	switch {
	case own != nil:
		return *own
	case db.opts.DefaultGPULimit > 0:
		return db.opts.DefaultGPULimit
	}
	return -1
}

// whereVolumesLie binds waiting runs to the host of their volumes, and says which volume another workspace writes.
func (t *tx) whereVolumesLie(list []fleet.Request, index map[fleet.RunKey]int) error {
	return each(t, func(row scanner) error {
		var key fleet.RunKey
		var name, hostName, writer string
		var host fleet.HostID
		if err := row.Scan(&key.Workspace, &key.Epoch, &name, textInto[fleet.HostID]{&host}, textInto[string]{&hostName}, textInto[string]{&writer}); err != nil {
			return err
		}
		i, ok := index[key]
		if !ok {
			return nil
		}
		r := &list[i]
		switch {
		case host == "":
		case r.HomeHost == "":
			r.HomeHost, r.HomeVolume = host, name
		case r.HomeHost != host && r.BusyVolume == "":
			r.BusyVolume = fmt.Sprintf("%s (it lies on host %s, while %s lies on another)", name, hostName, r.HomeVolume)
		}
		if writer != "" && r.BusyVolume == "" {
			r.BusyVolume = fmt.Sprintf("%s (in use by %s)", name, writer)
		}
		return nil
	}, `SELECT mount.workspace, mount.epoch, volume.name, volume.host, host.name,
		(SELECT other.name FROM mount AS taken JOIN workspace AS other ON other.id = taken.workspace
		 WHERE taken.volume = mount.volume AND taken.live = 1 AND taken.read_only = 0 AND mount.read_only = 0 AND taken.workspace <> mount.workspace)
		FROM run JOIN mount ON mount.workspace = run.workspace AND mount.epoch = run.epoch
		JOIN volume ON volume.id = mount.volume LEFT JOIN host ON host.id = volume.host
		WHERE run.placed_at IS NULL AND run.gone_at IS NULL ORDER BY mount.workspace, mount.position`)
}

func (t *tx) reservations() ([]fleet.Reservation, error) {
	return all(t, scanWith(func(r *fleet.Reservation) []any {
		return []any{&r.Run.Workspace, &r.Run.Epoch, &r.Host, jsonInto{&r.Devices}, timeInto{&r.Since}}
	}), `SELECT workspace, epoch, host, devices, since FROM reservation ORDER BY since, workspace`)
}
