package sqlite

import (
	"context"
	"slices"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

const deviceColumns = `device.id, device.host, device.ordinal, device.product, device.model, device.memory_mib, device.compute_capability, device.pci_bus_id,
	device.kind, device.parent, device.simulated, device.present, device.health, device.health_reason, device.excluded, device.excluded_reason`

func deviceInto(d *fleet.Device) []any {
	return []any{
		&d.ID, &d.Host, &d.Index, &d.Product, &d.Model, &d.MemoryMiB, &d.ComputeCapability, &d.PCIBusID,
		&d.Kind, &d.Parent, &d.Simulated, &d.Present, &d.Health, &d.HealthReason, &d.Excluded, &d.ExcludedReason,
	}
}

func scanDevice(s scanner) (fleet.Device, error) {
	var d fleet.Device
	err := s.Scan(deviceInto(&d)...)
	return d, err
}

// DeviceFilter chooses devices; empty fields choose all.
type DeviceFilter = fleet.DeviceFilter

// DeviceRow is a device and who holds it.
type DeviceRow = fleet.DeviceRow

// Devices returns devices by host, then index.
func (db *DB) Devices(ctx context.Context, filter DeviceFilter) (rows []DeviceRow, err error) {
	err = db.read(ctx, func(t *tx) error {
		rows, err = t.devices(filter)
		return err
	})
	return rows, err
}

func (t *tx) devices(filter DeviceFilter) ([]DeviceRow, error) {
	held, err := t.openLeases()
	if err != nil {
		return nil, err
	}
	unmanaged := map[fleet.DeviceID]bool{}
	err = each(t, func(s scanner) error {
		var list []fleet.Unmanaged
		if err := s.Scan(jsonInto{&list}); err != nil {
			return err
		}
		for _, u := range list {
			for _, d := range u.Devices {
				unmanaged[d] = true
			}
		}
		return nil
	}, `SELECT unmanaged FROM host WHERE unmanaged NOT IN ('[]', 'null', '')`)
	if err != nil {
		return nil, err
	}
	var rows []DeviceRow
	partHeld := map[fleet.DeviceID]bool{}
	err = each(t, func(s scanner) error {
		var r DeviceRow
		if err := s.Scan(append(deviceInto(&r.Device), &r.HostName, &r.Pool)...); err != nil {
			return err
		}
		if lease, ok := held[r.ID]; ok {
			r.Lease = &lease
			partHeld[r.Parent] = r.Parent != ""
		}
		rows = append(rows, r)
		return nil
	}, `SELECT `+deviceColumns+`, host.name, host.pool FROM device JOIN host ON host.id = device.host
		WHERE (?1 = '' OR host.pool = ?1) AND (?2 = '' OR host.id = ?2) ORDER BY host.name, device.ordinal, device.id`, filter.Pool, filter.Host)
	for i := range rows {
		r := &rows[i]
		ok, _ := r.Offered()
		_, wholeHeld := held[r.Parent]
		r.Free = ok && r.Lease == nil && !unmanaged[r.ID] && !partHeld[r.ID] && !wholeHeld
	}
	return slices.DeleteFunc(rows, func(r DeviceRow) bool { return filter.FreeOnly && !r.Free }), err
}

// SetExcluded takes a device out of use, or gives it back; a lease on it goes on. KindNotFound. Its host gets a new generation.
func (db *DB) SetExcluded(ctx context.Context, id fleet.DeviceID, excluded bool, reason string, now time.Time) (d fleet.Device, err error) {
	if !excluded {
		reason = ""
	}
	err = db.record(ctx, now, func(t *tx) error {
		d, err = scanDevice(t.row(`UPDATE device SET excluded = ?, excluded_reason = ? WHERE id = ? RETURNING `+deviceColumns, excluded, reason, id))
		if isNoRows(err) {
			return fleet.Errorf(fleet.KindNotFound, "there is no device %q; `carrel gpus` shows all", clip(string(id)))
		}
		if err != nil {
			return err
		}
		return t.bumpHost(d.Host)
	})
	return d, err
}

func (t *tx) bumpHost(id fleet.HostID) error {
	return t.exec(`UPDATE host SET generation = generation + 1 WHERE id = ?`, id)
}

// storeDevices makes a host's devices as its inventory says; those it does not name are no longer present. A device that another
// host reported is taken over only when that host lost it and nobody holds it: a device id that two hosts claim is refused to the later.
func (t *tx) storeDevices(host fleet.HostID, devices []fleet.Device) (problems []string, err error) {
	if err := t.exec(`UPDATE device SET present = 0 WHERE host = ?`, host); err != nil {
		return nil, err
	}
	for _, d := range devices {
		n, err := t.affect(`INSERT INTO device (id, host, ordinal, product, model, memory_mib, compute_capability, pci_bus_id, kind, parent, simulated, present,
			health, health_reason, excluded, excluded_reason) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?, 0, '')
			ON CONFLICT (id) DO UPDATE SET host = excluded.host, ordinal = excluded.ordinal, product = excluded.product, model = excluded.model,
			memory_mib = excluded.memory_mib, compute_capability = excluded.compute_capability, pci_bus_id = excluded.pci_bus_id, kind = excluded.kind,
			parent = excluded.parent, simulated = excluded.simulated, present = 1, health = excluded.health, health_reason = excluded.health_reason
			WHERE device.host = excluded.host
			OR (device.present = 0 AND NOT EXISTS (SELECT 1 FROM lease WHERE lease.device = device.id AND lease.released_at IS NULL))`,
			d.ID, host, d.Index, d.Product, d.Model, d.MemoryMiB, d.ComputeCapability, d.PCIBusID, d.Kind, d.Parent, d.Simulated, d.Health, d.HealthReason)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			problems = append(problems, "device "+clip(string(d.ID))+" is reported by another host too; it is not used here")
		}
	}
	return problems, nil
}
