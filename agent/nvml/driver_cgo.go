//go:build cgo && linux

package nvml

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/carrel-dev/carrel/agent/gpu"
)

// driver answers for one GPU at a time. NVML is initialised once and shared by all calls; it is shut down and opened anew
// only while no call is open, since a call that hangs cannot be taken back.
type driver struct {
	cfg  Config
	open func() (*session, error)

	mu      sync.Mutex
	session *session // nil while NVML is not initialised
	opened  time.Time
	opening bool
	calls   int  // open calls on the session
	lost    bool // a GPU was lost since the session was opened
	known   map[nvml.Device]string
	gpus    map[string]*members // by the GPU's UUID
}

// members are the handles of a GPU and its MIG instances.
type members struct {
	device     nvml.Device
	memoryMiB  int64
	registered bool // for events
	instances  []instance
}

type instance struct {
	device nvml.Device
	uuid   string
	gi, ci int
}

var _ gpu.Driver = (*driver)(nil)

func newDriver(cfg Config, open func() (*session, error)) *driver {
	return &driver{cfg: cfg, open: open, known: map[nvml.Device]string{}, gpus: map[string]*members{}}
}

var errNotOpen = errors.New("NVML is not open")

func (d *driver) Kind() gpu.SourceKind { return gpu.SourceNVML }

// acquire begins a call; release must follow.
func (d *driver) acquire() (*session, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.session == nil || d.opening {
		return nil, errNotOpen
	}
	d.calls++
	return d.session, nil
}

func (d *driver) release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls--
}

// Host implements gpu.Driver. A session that no longer answers is closed and opened anew in the same call, which gives
// either a good one or the exact reason.
func (d *driver) Host() (gpu.Host, error) {
	for first := true; ; first = false {
		s, err := d.ensure()
		if err != nil {
			return gpu.Host{}, err
		}
		host, ret := d.count(s)
		if ret == nvml.SUCCESS {
			return host, nil
		}
		err = fmt.Errorf("NVML gives no number of GPUs: %s", codeName(int(ret)))
		if !first || !d.drop() {
			return gpu.Host{}, err
		}
	}
}

// count asks how many GPUs there are, and releases the session.
func (d *driver) count(s *session) (gpu.Host, nvml.Return) {
	defer d.release()
	host := s.host
	n, ret := s.lib.DeviceGetCount()
	host.Count = n
	return host, ret
}

// ensure returns an open session, acquired.
func (d *driver) ensure() (*session, error) {
	now := d.cfg.Now()
	if s, err := d.acquire(); err == nil {
		removed := s.removed()
		d.release()
		d.mu.Lock()
		// With the library removed the session is given back too, so that the kernel module can be unloaded.
		reopen := removed || d.lost && now.Sub(d.opened) >= d.cfg.ReopenAfter
		d.mu.Unlock()
		if !reopen || !d.drop() {
			if removed {
				return nil, removedError(s.path)
			}
			return d.acquire()
		}
	}
	d.mu.Lock()
	if d.session != nil || d.opening {
		d.mu.Unlock()
		return d.acquire()
	}
	d.opening = true
	d.mu.Unlock()

	s, err := d.open()

	d.mu.Lock()
	d.opening = false
	if err == nil {
		d.session, d.opened, d.lost = s, now, false
	}
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return d.acquire()
}

// drop closes the session if no call is open on it, and reports whether it did.
func (d *driver) drop() bool {
	d.mu.Lock()
	if d.session == nil || d.opening || d.calls > 0 {
		d.mu.Unlock()
		return false
	}
	s := d.session
	d.session, d.opening = nil, true
	d.known, d.gpus = map[nvml.Device]string{}, map[string]*members{}
	d.mu.Unlock()

	s.shutdown()

	d.mu.Lock()
	defer d.mu.Unlock()
	d.opening = false
	return true
}

// Faults implements gpu.Driver: it takes what has come in and does not wait.
func (d *driver) Faults() ([]gpu.Fault, error) {
	s, err := d.acquire()
	if err != nil {
		return nil, err
	}
	defer d.release()
	if s.events == nil {
		return nil, nil
	}
	const most = 256 // per call; a storm of events must not keep us here
	var out []gpu.Fault
	for range most {
		event, ret := s.events.Wait(0)
		if ret == nvml.ERROR_TIMEOUT {
			break
		}
		if ret != nvml.SUCCESS {
			return out, fmt.Errorf("wait for NVML events: %s", codeName(int(ret)))
		}
		if event.EventType != nvml.EventTypeXidCriticalError {
			continue
		}
		if uuid := d.faulty(event); uuid != "" {
			out = append(out, gpu.Fault{UUID: uuid, XID: int(event.EventData), At: d.cfg.Now()})
		}
	}
	return out, nil
}

// faulty returns the UUID that an event is about: the MIG instance where the event names one that we know, else the GPU.
func (d *driver) faulty(e nvml.EventData) string {
	d.mu.Lock()
	uuid := d.known[e.Device]
	m := d.gpus[uuid]
	d.mu.Unlock()
	if uuid == "" {
		if u, ret := e.Device.GetUUID(); ret == nvml.SUCCESS {
			return u
		}
		return ""
	}
	if m != nil {
		for _, i := range m.instances {
			if i.gi == int(e.GpuInstanceId) && i.ci == int(e.ComputeInstanceId) {
				return i.uuid
			}
		}
	}
	return uuid
}

// Close implements gpu.Driver. Where a call hangs, NVML stays as it is until the process ends.
func (d *driver) Close() error {
	d.drop()
	return nil
}

// failure is an error of one call on one GPU.
func (d *driver) failure(device nvml.Device, call string, ret nvml.Return) error {
	e := &gpu.DeviceError{Call: call, Code: codeName(int(ret)), Lost: ret == nvml.ERROR_GPU_IS_LOST}
	d.mu.Lock()
	defer d.mu.Unlock()
	if device != nil {
		e.UUID = d.known[device]
	}
	if e.Lost {
		d.lost = true
	}
	return e
}
