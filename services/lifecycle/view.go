package lifecycle

import (
	"github.com/carrel-dev/carrel/services/fleet"
)

// QueuePlace returns where a queued workspace stands and why it does not start now, from the last plan.
func (l *Lifecycle) QueuePlace(id fleet.WorkspaceID) (fleet.Wait, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w, ok := l.waits[id]
	return w, ok
}

// Reserved returns the devices that are being kept free for a workspace.
func (l *Lifecycle) Reserved(id fleet.WorkspaceID) []fleet.DeviceID {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.reservations {
		if r.Run.Workspace == id {
			return r.Devices
		}
	}
	return nil
}

// Pull returns how far the image of a workspace is, while it is being fetched.
func (l *Lifecycle) Pull(id fleet.WorkspaceID) (fleet.Pull, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p, ok := l.pulls[id]
	return p.at, ok
}

// Sample returns the last measurement of a device.
func (l *Lifecycle) Sample(id fleet.DeviceID) (fleet.Sample, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s, ok := l.samples[id]
	return s, ok
}

// Samples returns the last measurement of each device.
func (l *Lifecycle) Samples() map[fleet.DeviceID]fleet.Sample {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make(map[fleet.DeviceID]fleet.Sample, len(l.samples))
	for id, s := range l.samples {
		out[id] = s
	}
	return out
}

// forget drops what is only remembered while a run waits or pulls.
func (l *Lifecycle) forget(id fleet.WorkspaceID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.waits, id)
	delete(l.pulls, id)
}
