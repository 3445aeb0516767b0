package gpu

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// DefaultProof is how long a device that failed must answer well before it is given out again.
const DefaultProof = 5 * time.Minute

// HealthRecord is what is kept about a GPU over restarts of the agent. MIG instances have one only while they are failed.
type HealthRecord struct {
	Device Device    `json:"device"` // as last seen well: what a lost GPU is shown as
	Failed bool      `json:"failed"`
	Lost   bool      `json:"lost"`
	Host   bool      `json:"host"` // gone with the whole driver, not by itself
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"`

	xid       int
	wellSince time.Time // begin of the proof; zero while it is not well
}

// HealthStore keeps the records over restarts, so that a restart never makes a bad GPU healthy nor forgets a lost one.
type HealthStore interface {
	Load() ([]HealthRecord, error)
	Save(records []HealthRecord) error
}

// HealthConfig sets up Watch.
type HealthConfig struct {
	Store    HealthStore // nil: kept in memory only
	Proof    time.Duration
	Classify func(xid int) XIDClass // default ClassifyXID
	Now      func() time.Time
	// OnSaveError is told when records could not be kept; nil ignores it.
	OnSaveError func(error)
}

// Watched is a source that remembers. A device that failed a question, reported a device-class XID, or whose driver asks for
// a recovery action is Failed; one that is no longer listed is Lost, with its last known UUID. A failed device comes back
// by itself once it was listed, answered, asked for no action and reported no new fault for the whole of Proof; a driver
// that vanished as a whole and came back needs no proof. A MIG instance that is no longer listed is simply gone: layouts
// change (see Leased).
type Watched struct {
	Source
	cfg  HealthConfig
	turn chan struct{} // holds one token while records are being saved

	mu      sync.Mutex
	records map[string]*HealthRecord
	order   []string // UUIDs of whole GPUs, as first seen
	dirty   bool
}

// Watch loads the kept records and watches over src.
func Watch(src Source, cfg HealthConfig) (*Watched, error) {
	if cfg.Proof <= 0 {
		cfg.Proof = DefaultProof
	}
	if cfg.Classify == nil {
		cfg.Classify = ClassifyXID
	}
	h := &Watched{Source: src, cfg: cfg, records: map[string]*HealthRecord{}, turn: make(chan struct{}, 1)}
	if cfg.Store == nil {
		return h, nil
	}
	kept, err := cfg.Store.Load()
	if err != nil {
		return nil, fmt.Errorf("load the device health records: %w", err)
	}
	for _, r := range kept {
		if r.Device.UUID == "" {
			continue
		}
		h.records[r.Device.UUID] = &r
		if r.Device.Kind != KindMIGInstance {
			h.order = append(h.order, r.Device.UUID)
		}
	}
	return h, nil
}

// Forget drops what is known of a GPU, for one that was taken out of the host for good.
func (h *Watched) Forget(uuid string) {
	h.mu.Lock()
	delete(h.records, uuid)
	h.order = slices.DeleteFunc(h.order, func(u string) bool { return u == uuid })
	h.dirty = true
	h.mu.Unlock()
	h.save()
}

// Inventory implements Source.
func (h *Watched) Inventory(ctx context.Context) (Inventory, error) {
	inv, err := h.Source.Inventory(ctx)
	if err != nil {
		return Inventory{}, err
	}
	inv = inv.clone()
	now := h.cfg.Now()
	h.mu.Lock()
	listed := map[string]bool{}
	for i := range inv.Devices {
		d := &inv.Devices[i]
		listed[d.UUID] = true
		h.judge(d, now)
	}
	h.propagate(&inv)
	h.addLost(&inv, listed, now)
	h.dropInstances(listed)
	h.mu.Unlock()
	h.save()
	return inv, nil
}

// judge updates a listed device's record and sets the device's health from it. The caller holds the lock.
func (h *Watched) judge(d *Device, now time.Time) {
	r := h.records[d.UUID]
	if r == nil {
		r = &HealthRecord{}
		h.records[d.UUID] = r
		if d.Kind != KindMIGInstance {
			h.order = append(h.order, d.UUID)
		}
		h.dirty = true
	}
	switch {
	case d.Health.State != Healthy:
		h.fail(r, d.Health.Reason, d.Health.State == Lost, now)
	case d.Recovery.Needed():
		h.fail(r, "the driver asks: "+string(d.Recovery), false, now)
	case r.Failed && r.Host:
		h.heal(r)
	case r.Failed && r.wellSince.IsZero():
		r.wellSince, r.Lost = now, false
	case r.Failed && now.Sub(r.wellSince) >= h.cfg.Proof:
		h.heal(r)
	}
	if d.Model != "" && d.Health.State == Healthy && !sameDevice(r.Device, *d) {
		r.Device = remembered(*d)
		h.dirty = true
	} else if r.Device.UUID == "" {
		r.Device = remembered(*d)
	}
	d.Health = h.health(r)
}

// health is the record as shown. The caller holds the lock.
func (h *Watched) health(r *HealthRecord) Health {
	if !r.Failed {
		return Health{State: Healthy, LastXID: r.xid}
	}
	out := Health{State: Failed, Reason: r.Reason, Since: r.Since, LastXID: r.xid}
	if r.Lost {
		out.State = Lost
	}
	if !r.wellSince.IsZero() {
		out.Reason += fmt.Sprintf("; answers well since %s, back after %s of that",
			r.wellSince.UTC().Format(time.RFC3339), h.cfg.Proof)
	}
	return out
}

func (h *Watched) fail(r *HealthRecord, reason string, lost bool, now time.Time) {
	if !r.Failed {
		r.Since = now
	}
	if !r.Failed || r.Lost != lost || r.Host || r.Reason != reason {
		h.dirty = true
	}
	r.Failed, r.Lost, r.Host, r.Reason, r.wellSince = true, lost, false, reason, time.Time{}
}

func (h *Watched) heal(r *HealthRecord) {
	r.Failed, r.Lost, r.Host, r.Reason, r.Since, r.wellSince = false, false, false, "", time.Time{}, time.Time{}
	h.dirty = true
}

// propagate makes the instances of a failed GPU failed too.
func (h *Watched) propagate(inv *Inventory) {
	for i := range inv.Devices {
		d := &inv.Devices[i]
		if d.Parent == "" || d.Health.State != Healthy {
			continue
		}
		if parent, ok := inv.Find(d.Parent); ok && parent.Health.State != Healthy {
			xid := d.Health.LastXID
			d.Health = parent.Health
			d.Health.LastXID = xid
			d.Health.Reason = "its GPU: " + d.Health.Reason
		}
	}
}

// addLost adds the whole GPUs that are known and no longer listed. The caller holds the lock.
func (h *Watched) addLost(inv *Inventory, listed map[string]bool, now time.Time) {
	hostDown := inv.Problem != "" && len(listed) == 0
	reason := "the driver no longer lists it"
	if inv.Problem != "" {
		reason = inv.Problem
	}
	for _, uuid := range h.order {
		r := h.records[uuid]
		if listed[uuid] {
			continue
		}
		switch {
		case hostDown && r.Failed && !r.Host:
			r.wellSince = time.Time{} // what it failed for still holds
		case hostDown:
			if !r.Failed || r.Reason != reason {
				h.fail(r, reason, true, now)
				r.Host = true
			}
		default:
			h.fail(r, reason, true, now)
		}
		d := r.Device
		d.UUID = uuid
		d.Health = h.health(r)
		inv.Devices = append(inv.Devices, d)
	}
}

// dropInstances forgets the MIG instances that are gone. The caller holds the lock.
func (h *Watched) dropInstances(listed map[string]bool) {
	for uuid, r := range h.records {
		if r.Device.Kind == KindMIGInstance && !listed[uuid] {
			delete(h.records, uuid)
		}
	}
}

// Sample implements Source; it takes the faults in the samples into account.
func (h *Watched) Sample(ctx context.Context) ([]Sample, error) {
	samples, err := h.Source.Sample(ctx)
	if err != nil {
		return nil, err
	}
	now := h.cfg.Now()
	h.mu.Lock()
	for _, s := range samples {
		for _, f := range s.Faults {
			h.fault(f, now)
		}
	}
	h.mu.Unlock()
	h.save()
	return samples, nil
}

func (h *Watched) fault(f Fault, now time.Time) {
	r := h.records[f.UUID]
	if r == nil {
		return // never listed: there is nothing to protect
	}
	r.xid = f.XID
	if h.cfg.Classify(f.XID) == XIDDevice {
		h.fail(r, fmt.Sprintf("XID %d at %s", f.XID, f.At.UTC().Format(time.RFC3339)), false, now)
	}
}

// save keeps the records where they changed.
func (h *Watched) save() {
	if h.cfg.Store == nil {
		return
	}
	h.turn <- struct{}{}
	defer func() { <-h.turn }()
	records, dirty := h.changed()
	if !dirty {
		return
	}
	if err := h.cfg.Store.Save(records); err != nil {
		h.mu.Lock()
		h.dirty = true
		h.mu.Unlock()
		if h.cfg.OnSaveError != nil {
			h.cfg.OnSaveError(fmt.Errorf("save the device health records: %w", err))
		}
	}
}

// changed returns the records to keep, in order of UUID, where they changed since it was last asked.
func (h *Watched) changed() ([]HealthRecord, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.dirty {
		return nil, false
	}
	h.dirty = false
	var out []HealthRecord
	for _, r := range h.records {
		if r.Failed || r.Device.Kind != KindMIGInstance {
			out = append(out, *r)
		}
	}
	slices.SortFunc(out, func(a, b HealthRecord) int { return strings.Compare(a.Device.UUID, b.Device.UUID) })
	return out, true
}

// remembered is the part of a device that is kept.
func remembered(d Device) Device {
	d.Health, d.Recovery = Health{}, RecoveryUnknown
	d.Instances, d.Processes, d.ForeignProcesses = nil, nil, nil
	return d
}

func sameDevice(a, b Device) bool {
	return a.UUID == b.UUID && a.Index == b.Index && a.Kind == b.Kind && a.Model == b.Model &&
		a.MemoryMiB == b.MemoryMiB && a.DriverVersion == b.DriverVersion && a.PCIBusID == b.PCIBusID
}
