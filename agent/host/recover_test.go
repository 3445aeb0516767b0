package host_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/host"
	"github.com/carrel-dev/carrel/agent/host/hosttest"
)

// REL-01, R-4: the agent dies and comes back; what runs goes on untouched.
func TestREL01AgentRestart(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		r.apply(d)
		before := r.ready(d.Key)
		journal := r.observe(0).journal
		starts := r.count("Start")
		for range 20 {
			pass(7 * time.Second)
			r.restart()
			r.apply(d)
			o := r.within(5*time.Second, d.Key, "ready", func(o host.Observed) bool { return o.Phase == host.PhaseReady })
			if o.ContainerID != before.ContainerID {
				t.Fatalf("another container: %+v", o)
			}
		}
		o := r.of(d.Key)
		about(t, "started", o.StartedAge, 140*time.Second, 5*time.Second)
		if r.count("Start") != starts || r.observe(0).journal != journal {
			t.Error("started again, or another journal")
		}
		if pid := r.inside.pids[d.Key]; pid == 0 {
			t.Error("carrel-init's process was not attached")
		}
	})
}

// REL-02, ACCT-05, ACCT-12: what ended while the agent was down.
func TestREL02EndedWhileTheAgentWasDown(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		killed, exited, vanished, lives := run("w1", 1), run("w2", 1), run("w3", 1), run("w4", 1)
		r.apply(killed, exited, vanished, lives)
		for _, d := range []host.Desired{killed, exited, vanished, lives} {
			r.ready(d.Key)
		}
		pass(time.Minute)
		r.kill()
		pass(time.Minute)
		r.engine.Exit("carrel-w1-1", 137, false)
		r.engine.Exit("carrel-w2-1", 3, false)
		r.engine.Vanish("carrel-w3-1")
		pass(10 * time.Minute)
		r.engine.LoseEvents() // an engine keeps only the last ones
		r.start()
		r.apply(killed, exited, vanished, lives)

		o := r.within(30*time.Second, killed.Key, "gone", func(o host.Observed) bool { return o.Phase == host.PhaseGone })
		wantReason(t, o, host.ReasonKilled)
		about(t, "w1 ended", o.EndedAge, 10*time.Minute, 2*time.Second)
		o = r.gone(exited.Key)
		wantReason(t, o, host.ReasonExited)
		if *o.ExitCode != 3 || o.EndedUnattested {
			t.Errorf("%+v", o)
		}
		about(t, "w2 ended", o.EndedAge, 10*time.Minute, 2*time.Second)
		o = r.gone(vanished.Key)
		wantReason(t, o, host.ReasonRemoved)
		if !o.EndedUnattested {
			t.Error("nobody saw w3's end, and it says that somebody did")
		}
		about(t, "w3 last seen", o.EndedAge, 11*time.Minute, 15*time.Second)
		r.ready(lives.Key)
		r.wantNames("carrel-w4-1")
	})
}

// REL-05, ACCT-12: a container removed or killed from outside is known within seconds, with the time at which it died.
func TestREL05RemovedOutside(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		r.apply(d)
		r.ready(d.Key)
		pass(time.Minute)
		r.engine.Vanish("carrel-w1-1")
		o := r.within(time.Second, d.Key, "gone", func(o host.Observed) bool { return o.Phase == host.PhaseGone })
		wantReason(t, o, host.ReasonRemoved)
		if o.EndedUnattested || o.ExitCode == nil {
			t.Errorf("the event told it: %+v", o)
		}
		about(t, "ended", o.EndedAge, 0, time.Second)
		// Stop is an idempotent success, and a new epoch starts on the same volume.
		r.apply(gone(d))
		r.gone(d.Key)
		next := run("w1", 2)
		r.apply(next)
		r.ready(next.Key)
	})
}

// REL-06: events that are lost, cut off or late hide nothing for long, and cost little.
func TestREL06LostEvents(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		var runs []host.Desired
		for i := range 4 {
			runs = append(runs, run(fmt.Sprintf("w%d", i), 1))
		}
		r.apply(runs...)
		for i := range runs {
			r.ready(runs[i].Key)
		}
		// No events at all: the comparison finds it.
		r.engine.Fail(func(call string) error {
			if call == "Events" {
				return host.Errorf(host.KindUnavailable, "cut")
			}
			return nil
		}, nil)
		r.engine.LoseEvents()
		pass(time.Second)
		r.engine.Exit("carrel-w0-1", 1, false)
		r.engine.LoseEvents()
		o := r.within(30*time.Second, runs[0].Key, "gone", func(o host.Observed) bool { return o.Phase == host.PhaseGone })
		wantReason(t, o, host.ReasonExited)
		before := r.count("Events")
		pass(10 * time.Minute)
		if n := r.count("Events") - before; n > 100 {
			t.Errorf("%d connections for events in 10 min", n)
		}
		// Cut every 5 s: each gap is compared.
		r.engine.Fail(nil, nil)
		pass(time.Minute)
		for i := range 3 {
			r.engine.LoseEvents()
			r.engine.Exit(runs[i+1].Key.Container(), 1, false)
			r.engine.LoseEvents()
			r.within(30*time.Second, runs[i+1].Key, "gone", func(o host.Observed) bool { return o.Phase == host.PhaseGone })
			pass(5 * time.Second)
		}
	})
}

// REL-04: what somebody else restarted is another life; the run ended with the first.
func TestREL04RestartedOutside(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		r.apply(d)
		r.ready(d.Key)
		pass(time.Minute)
		r.engine.Restart("carrel-w1-1")
		o := r.gone(d.Key)
		wantReason(t, o, host.ReasonRestarted)
		about(t, "started", o.StartedAge, time.Minute, 2*time.Second)
		r.wantNames()
	})
}

// REL-19: an older set is refused, also after a restart, and changes nothing.
func TestREL19OlderStampIsRefused(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		r.stamp = host.Stamp{Database: 2, Session: 5, Generation: 7}
		r.apply(d)
		r.ready(d.Key)
		for _, restart := range []bool{false, true} {
			if restart {
				r.restart()
			}
			for _, old := range []host.Stamp{{Database: 1, Session: 99, Generation: 99}, {Database: 2, Session: 4, Generation: 99}, {Database: 2, Session: 5, Generation: 7}} {
				highest, err := r.host.Apply(t.Context(), old, host.Set{Runs: []host.Desired{gone(d)}})
				if host.KindOf(err) != host.KindStale || highest != r.stamp {
					t.Errorf("%v: %v, highest %v", old, err, highest)
				}
			}
		}
		if _, err := r.host.Apply(t.Context(), r.stamp, host.Set{Runs: []host.Desired{d}}); err != nil {
			t.Errorf("the same again: %v", err)
		}
		pass(time.Minute)
		r.wantNames("carrel-w1-1")
	})
}

// D3, REL-20: a gateway that does not name a run kills nothing; the container and its devices are shown.
func TestAbsenceNeverKills(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		d.Devices = []host.Grant{{ID: simOne, Simulated: true}}
		r.apply(d)
		r.ready(d.Key)
		r.apply()
		pass(10 * time.Minute)
		r.restart()
		r.stamp.Session++
		r.apply()
		pass(time.Minute)
		r.wantNames("carrel-w1-1")
		s := r.observe(0)
		if len(s.facts.Unmanaged) != 1 || s.facts.Unmanaged[0].Key != d.Key || s.facts.Unmanaged[0].Devices[0] != simOne || !s.facts.Unmanaged[0].Running {
			t.Errorf("unmanaged: %+v", s.facts.Unmanaged)
		}
		// Its device is given to nobody.
		other := run("w2", 1)
		other.Devices = d.Devices
		r.apply(other)
		pass(time.Minute)
		o := r.of(other.Key)
		if o.Phase == host.PhaseReady || o.Reason.Code != host.ReasonDeviceBusy {
			t.Errorf("%+v", o)
		}
		// Named again it goes on; named gone it goes, and the other starts.
		r.apply(d, other)
		r.ready(d.Key)
		r.apply(gone(d), other)
		r.ready(other.Key)
	})
}

// T-17: labels that were copied or made up are shown and never taken for ours.
func TestT17Strangers(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		r.apply(d)
		r.ready(d.Key)
		made := map[string]string{host.LabelHost: "h1", host.LabelWorkspace: "w2", host.LabelEpoch: "1", host.LabelDevices: simTwo, host.LabelMounts: "", host.LabelSignature: "AAAA"}
		r.engine.Put(host.Container{Name: "carrel-w2-1", State: host.StateRunning, PID: 77, Labels: made})
		copied := r.opts.Signer.Labels(d.Key, d.Devices, d.Mounts)
		r.engine.Put(host.Container{Name: "evil", State: host.StateRunning, PID: 78, Labels: copied})
		r.engine.Put(host.Container{Name: "carrel-w3-1", State: host.StateRunning, PID: 79, Labels: r.opts.Signer.Labels(host.Key{Workspace: "w3", Epoch: 1}, nil, nil)})
		r.restart()
		r.apply(d, run("w3", 1))
		pass(time.Minute)
		s := r.observe(0)
		names := map[string]host.Unmanaged{}
		for _, u := range s.facts.Unmanaged {
			names[u.Name] = u
		}
		if u, ok := names["carrel-w2-1"]; !ok || u.Key.Workspace != "" || len(u.Devices) != 0 {
			t.Errorf("made up: %+v", names)
		}
		if _, ok := names["evil"]; !ok {
			t.Errorf("copied: %+v", names)
		}
		if got := r.inside.pids[d.Key]; got == 78 {
			t.Error("the copy's process was attached")
		}
		// Signed, and not in the journal: not adopted, not killed, an admin is told.
		if o := s.runs[host.Key{Workspace: "w3", Epoch: 1}]; o.Phase == host.PhaseReady || o.Reason.Code != host.ReasonConflict {
			t.Errorf("w3: %+v", o)
		}
		r.wantNames("carrel-w1-1", "carrel-w2-1", "carrel-w3-1", "evil")
	})
}

// T-17: the labels that an image brings under our names do not disturb our own.
func TestT17ImageWithOurLabels(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		image := host.Image{ID: hosttest.ID("bad"), Labels: map[string]string{
			host.LabelHost: "x", host.LabelWorkspace: "w9", host.LabelEpoch: "9", host.LabelDevices: simTwo, host.LabelMounts: "m", host.LabelSignature: "s", "dev.carrel.other": "y",
		}}
		r.engine.AddImage(image, "registry.example.com/team/torch@"+hosttest.ID("torch-digest"))
		d := run("w1", 1)
		r.apply(d)
		r.ready(d.Key)
		r.restart()
		r.apply(d)
		r.ready(d.Key)
	})
}

// an engine that gives no answer ends nothing, and the silence is told.
func TestR5EngineSilent(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		r.apply(d)
		r.ready(d.Key)
		r.engine.LoseEvents()
		r.engine.Fail(func(string) error { return host.Errorf(host.KindUnavailable, "no answer") }, nil)
		pass(time.Minute)
		o := r.of(d.Key)
		if o.Phase != host.PhaseReady || o.EngineSilent == nil || *o.EngineSilent < 30*time.Second || o.EndedAge != nil {
			t.Errorf("silent: %+v", o)
		}
		if f := r.observe(0).facts; f.EngineVersion != "" || len(f.Problems) == 0 {
			t.Errorf("facts: %+v", f)
		}
		r.apply(gone(d))
		pass(time.Minute)
		if o := r.of(d.Key); o.Phase == host.PhaseGone {
			t.Errorf("gone without an answer: %+v", o)
		}
		r.engine.Fail(nil, nil)
		r.gone(d.Key)
		if f := r.observe(0).facts; f.EngineVersion == "" {
			t.Errorf("facts: %+v", f)
		}
	})
}

// after a reboot runs end at the last moment that was seen, whatever the engine wrote when it found them.
func TestR19Reboot(t *testing.T) {
	for _, c := range []struct {
		name    string
		after   func(r *rig)
		ago     time.Duration
		attests bool
	}{
		{"the engine found it dead", func(r *rig) { r.engine.Exit("carrel-w1-1", 255, false) }, time.Hour, false},
		{"it is no longer there", func(r *rig) { r.engine.Vanish("carrel-w1-1") }, time.Hour, false},
		{"somebody started it", func(r *rig) { r.engine.Restart("carrel-w1-1") }, time.Hour, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				d := run("w1", 1)
				r.apply(d)
				r.ready(d.Key)
				pass(time.Minute)
				r.kill()
				pass(time.Hour)
				r.clock.reboot("boot-2")
				pass(10 * time.Second)
				c.after(r)
				r.engine.LoseEvents()
				pass(time.Second)
				r.start()
				r.apply(d)
				o := r.gone(d.Key)
				wantReason(t, o, host.ReasonRebooted)
				if o.EndedUnattested == c.attests {
					t.Errorf("%+v", o)
				}
				about(t, "ended", o.EndedAge, c.ago+11*time.Second, 15*time.Second)
				r.wantNames()
			})
		})
	}
	t.Run("it had ended before", func(t *testing.T) {
		bubble(t, func(t *testing.T, r *rig) {
			d := run("w1", 1)
			r.apply(d)
			r.ready(d.Key)
			r.kill()
			pass(time.Minute)
			r.engine.Exit("carrel-w1-1", 3, false)
			pass(time.Hour)
			r.clock.reboot("boot-2")
			r.engine.LoseEvents()
			r.start()
			r.apply(d)
			o := r.gone(d.Key)
			if o.EndedUnattested || o.ExitCode == nil || *o.ExitCode != 3 {
				t.Errorf("%+v", o)
			}
			about(t, "ended", o.EndedAge, time.Hour, 5*time.Second)
		})
	})
}

// ACCT-14, and a wall clock that is set: an end stays where it was, and lies between what was seen.
func TestACCT14ClockSetBack(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		r.apply(d)
		r.ready(d.Key)
		pass(2 * time.Minute)
		r.clock.set(-time.Hour)
		r.engine.Exit("carrel-w1-1", 0, false)
		o := r.gone(d.Key)
		about(t, "started", o.StartedAge, 2*time.Minute, 2*time.Second)
		about(t, "ended", o.EndedAge, 0, 20*time.Second)
		r.clock.set(0)
		pass(time.Minute)
		again := r.of(d.Key)
		about(t, "ended", again.EndedAge, *o.EndedAge+time.Minute, time.Second)
	})
}

// D1: a run is not gone while a process of its own, or one that nobody can name, is on its device.
func TestDeviceStillHeld(t *testing.T) {
	const id = "GPU-11111111-2222-3333-4444-555555555555"
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		d.Devices = []host.Grant{{ID: id}}
		r.gpus.set(func() {
			r.gpus.inventory = gpu.Inventory{Source: gpu.SourceNVML, Devices: []gpu.Device{{UUID: id, Kind: gpu.KindGPU, Health: gpu.Health{State: gpu.Healthy}}}}
			r.gpus.samples = []gpu.Sample{{UUID: id, ProcessesState: gpu.Fresh, Processes: []gpu.Process{{PID: 5, Type: gpu.Compute, Workspace: d.Key.String(), Name: "python"}}}}
		})
		r.apply(d)
		r.ready(d.Key)
		r.apply(gone(d))
		for _, held := range []func(){
			func() {},
			func() { r.gpus.samples[0].Processes = []gpu.Process{{PID: 5, Type: gpu.Compute}} },
			func() { r.gpus.samples[0].ProcessesState, r.gpus.samples[0].Processes = gpu.Missing, nil },
			func() { r.gpus.samples = nil },
		} {
			r.gpus.set(held)
			pass(time.Minute)
			if o := r.of(d.Key); o.Phase != host.PhaseStopping {
				t.Errorf("%+v", o)
			}
			r.wantNames()
		}
		// Somebody else's process, and a desktop, hold back nothing.
		r.gpus.set(func() {
			r.gpus.samples = []gpu.Sample{{UUID: id, ProcessesState: gpu.Fresh, Processes: []gpu.Process{
				{PID: 6, Type: gpu.Compute, Name: "other"}, {PID: 7, Type: gpu.Graphics},
			}}}
		})
		o := r.gone(d.Key)
		about(t, "ended", o.EndedAge, 4*time.Minute, 5*time.Second)
	})
}

// GPU-03: a run ends although its device is lost; what was last seen on the device does not hold it.
func TestGPU03LostDeviceHoldsNothing(t *testing.T) {
	const id = "GPU-11111111-2222-3333-4444-555555555555"
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		d.Devices = []host.Grant{{ID: id}}
		r.gpus.set(func() {
			r.gpus.inventory = gpu.Inventory{Source: gpu.SourceNVML, Devices: []gpu.Device{{UUID: id, Kind: gpu.KindGPU, Health: gpu.Health{State: gpu.Healthy}}}}
		})
		r.apply(d)
		r.ready(d.Key)
		r.gpus.set(func() {
			r.gpus.inventory.Devices[0].Health = gpu.Health{State: gpu.Lost, Reason: "GPU_IS_LOST"}
			r.gpus.samples = []gpu.Sample{{UUID: id, ProcessesState: gpu.Stale, Processes: []gpu.Process{{PID: 5, Type: gpu.Compute, Workspace: d.Key.String()}}}}
		})
		pass(time.Minute)
		if o := r.of(d.Key); o.Phase != host.PhaseReady {
			t.Errorf("with a lost device it is %+v", o)
		}
		r.apply(gone(d))
		r.gone(d.Key)
	})
}

// GPU-11, GPU-12: whether the engine gives GPUs is found out when the first one appears, also long after the agent's start.
func TestGPU12DeviceAppears(t *testing.T) {
	const id = "GPU-11111111-2222-3333-4444-555555555555"
	bubble(t, func(t *testing.T, r *rig) {
		r.kill()
		r.engine.SetProbe(host.ProbeResult{GPU: "could not select device driver"})
		r.gpus.set(func() { r.gpus.inventory = gpu.Inventory{Source: gpu.SourceNVML, Problem: "no library"} })
		r.start()
		for _, wait := range []time.Duration{5 * time.Second, time.Hour} {
			pass(wait)
			if f := r.observe(0).facts; len(f.Devices) > 0 || strings.Contains(strings.Join(f.Problems, "\n"), "GPU runtime missing") {
				t.Errorf("without devices: %+v, %v", f.Devices, f.Problems)
			}
		}
		r.gpus.set(func() {
			r.gpus.inventory = gpu.Inventory{Source: gpu.SourceNVML, Devices: []gpu.Device{{UUID: id, Kind: gpu.KindGPU, Health: gpu.Health{State: gpu.Healthy}}}}
		})
		pass(15 * time.Second)
		if f := r.observe(0).facts; len(f.Devices) != 1 || f.Devices[0].State != "no_runtime" {
			t.Errorf("%+v, %v", f.Devices, f.Problems)
		}
		// Somebody installs it, and restarts the engine at once.
		r.engine.SetProbe(host.ProbeResult{})
		r.engine.LoseEvents()
		pass(2 * time.Minute)
		if f := r.observe(0).facts; len(f.Devices) != 1 || f.Devices[0].State != "ok" {
			t.Errorf("%+v, %v", f.Devices, f.Problems)
		}
	})
}

// GPU-11: an engine that gives no GPUs is told with the facts, and a run is not started with fewer devices than granted.
func TestGPU11RuntimeMissing(t *testing.T) {
	const id = "GPU-11111111-2222-3333-4444-555555555555"
	bubble(t, func(t *testing.T, r *rig) {
		r.kill()
		r.engine.SetProbe(host.ProbeResult{GPU: "could not select device driver"})
		r.gpus.set(func() {
			r.gpus.inventory = gpu.Inventory{Source: gpu.SourceNVML, Devices: []gpu.Device{{UUID: id, Kind: gpu.KindGPU, Health: gpu.Health{State: gpu.Healthy}}}}
		})
		r.start()
		d := run("w1", 1)
		d.Devices = []host.Grant{{ID: id}}
		none := run("w2", 1)
		r.apply(d, none)
		wantReason(t, r.gone(d.Key), host.ReasonGPURuntime)
		r.ready(none.Key)
		f := r.observe(0).facts
		if f.Devices[0].State != "no_runtime" || !strings.Contains(strings.Join(f.Problems, "\n"), "GPU runtime missing") {
			t.Errorf("%+v, %v", f.Devices, f.Problems)
		}
	})
}

// a journal that cannot be written stops new starts, and nothing that runs.
func TestR9JournalFull(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		r.apply(d)
		r.ready(d.Key)
		moved := r.opts.DataDir + "-away"
		if err := os.Rename(r.opts.DataDir, moved); err != nil {
			t.Fatal(err)
		}
		r.stamp.Generation++
		if _, err := r.host.Apply(t.Context(), r.stamp, host.Set{Runs: []host.Desired{d, run("w2", 1)}}); host.KindOf(err) != host.KindUnavailable {
			t.Errorf("apply: %v", err)
		}
		pass(time.Minute)
		r.wantNames("carrel-w1-1")
		if o := r.of(d.Key); o.Phase != host.PhaseReady {
			t.Errorf("%+v", o)
		}
		r.engine.Exit("carrel-w1-1", 2, false)
		pass(time.Minute)
		o := r.of(d.Key)
		if o.ExitCode == nil || *o.ExitCode != 2 {
			t.Errorf("the end is told all the same: %+v", o)
		}
		r.wantNames("carrel-w1-1") // what was noted is not on disk yet
		if err := os.Rename(moved, r.opts.DataDir); err != nil {
			t.Fatal(err)
		}
		r.gone(d.Key)
		r.apply(d, run("w2", 1))
		r.ready(host.Key{Workspace: "w2", Epoch: 1})
	})
}
