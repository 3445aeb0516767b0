package host_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/host"
	"github.com/carrel-dev/carrel/agent/host/hosttest"
)

func TestFakeEngineKeepsTheContract(t *testing.T) {
	hosttest.Contract(t, func(t *testing.T) hosttest.Bench {
		e := hosttest.NewEngine(time.Now)
		e.AddImage(host.Image{ID: hosttest.ID("img")}, "img:1")
		return hosttest.Bench{
			Runtime: e, Image: "img:1", Lines: nil,
			Key: func(epoch int64) host.Key { return host.Key{Workspace: "w1", Epoch: epoch} },
			Spec: func(_ *testing.T, k host.Key, image string) host.Spec {
				return host.Spec{Key: k, Image: image, Labels: map[string]string{host.LabelWorkspace: k.Workspace}}
			},
			Kill:   func(_ *testing.T, name string) { e.Exit(name, 137, false) },
			Vanish: func(_ *testing.T, name string) { e.Vanish(name) },
		}
	})
}

func TestALife(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		d.Devices = []host.Grant{{ID: simOne, Simulated: true}}
		r.apply(d)
		o := r.ready(d.Key)
		if o.ContainerID == "" || o.Sudo != "yes" || o.ImageDigest != d.ImageDigest || o.Reason.Code != "" || o.EndedAge != nil {
			t.Errorf("ready: %+v", o)
		}
		about(t, "started", o.StartedAge, 0, 200*time.Millisecond)
		r.wantNames("carrel-w1-1")
		pass(90 * time.Second)
		about(t, "started", r.of(d.Key).StartedAge, 90*time.Second, time.Second)

		r.apply(gone(d))
		o = r.gone(d.Key)
		wantReason(t, o, host.ReasonStopped)
		if o.Reason.Message != "stopped by ana" || !slices.Equal(r.inside.stops, []string{"w1/1: stopped by ana"}) {
			t.Errorf("told %q, reported %+v", r.inside.stops, o.Reason)
		}
		about(t, "ended", o.EndedAge, 0, 300*time.Millisecond)
		r.wantNames()
		if len(r.inside.forgot) != 1 {
			t.Errorf("forgotten: %v", r.inside.forgot)
		}

		// Gone stays gone, also when it is asked for again.
		r.apply(d)
		pass(time.Minute)
		if o := r.of(d.Key); o.Phase != host.PhaseGone {
			t.Errorf("asked again: %+v", o)
		}
		r.wantNames()

		// Kept until acknowledged and no longer wanted.
		seq := r.observe(0).seq
		r.observe(seq)
		if len(r.observe(0).runs) != 1 {
			t.Error("a wanted record was dropped")
		}
		r.apply()
		if len(r.observe(0).runs) != 1 {
			t.Error("a record was dropped before it was acknowledged")
		}
		r.observe(r.observe(0).seq)
		if s := r.observe(0); len(s.runs) != 0 {
			t.Errorf("acknowledged: %+v", s.runs)
		}
	})
}

func TestSSHKeysChangeLive(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		r.apply(d)
		r.ready(d.Key)
		d.SSH.AuthorizedKeys = []string{"ssh-ed25519 AAAA"}
		r.apply(d)
		r.within(time.Second, d.Key, "told", func(host.Observed) bool { return len(r.inside.config[d.Key]) == 2 })
		r.apply(d) // nothing new
		pass(time.Minute)
		if got := r.inside.config[d.Key]; len(got) != 2 || len(got[1].SSH.AuthorizedKeys) != 1 || got[1].Home != "/home/ana" {
			t.Errorf("told %+v", got)
		}
	})
}

func TestStopWhileItStarts(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.inside.answer = func(ctx context.Context) (host.InsideAnswer, error) {
			<-ctx.Done()
			return host.InsideAnswer{}, ctx.Err()
		}
		d := run("w1", 1)
		r.apply(d)
		r.within(time.Minute, d.Key, "starting", func(o host.Observed) bool { return o.Phase == host.PhaseStarting && o.StartedAge != nil })
		r.apply(gone(d))
		wantReason(t, r.within(2*time.Second, d.Key, "gone", func(o host.Observed) bool { return o.Phase == host.PhaseGone }), host.ReasonStopped)
		r.wantNames()
	})
}

func TestCarrelInitThatNeverAnswers(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.inside.answer = func(ctx context.Context) (host.InsideAnswer, error) {
			<-ctx.Done()
			return host.InsideAnswer{}, ctx.Err()
		}
		d := run("w1", 1)
		r.apply(d)
		o := r.within(3*time.Minute, d.Key, "gone", func(o host.Observed) bool { return o.Phase == host.PhaseGone })
		wantReason(t, o, host.ReasonNotReady)
		r.wantNames()
	})
}

func TestCarrelInitThatRefuses(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.inside.answer = func(context.Context) (host.InsideAnswer, error) {
			return host.InsideAnswer{}, host.Errorf(host.KindInvalid, "home /home/ana is not a directory")
		}
		d := run("w1", 1)
		r.apply(d)
		o := r.gone(d.Key)
		wantReason(t, o, host.ReasonRefused)
		if !strings.Contains(o.Reason.Message, "not a directory") {
			t.Errorf("%+v", o.Reason)
		}
	})
}

// the owner sees why, the last lines and the exit status.
func TestR7EndsByItself(t *testing.T) {
	for _, c := range []struct {
		name   string
		code   int
		memory bool
		want   string
	}{
		{"status 3", 3, false, host.ReasonExited},
		{"out of memory", 137, true, host.ReasonOutOfMemory},
		{"killed", 137, false, host.ReasonKilled},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				d := run("w1", 1)
				r.apply(d)
				r.ready(d.Key)
				var lines []string
				for range 30 {
					lines = append(lines, "line\xff")
				}
				r.engine.Exit("carrel-w1-1", c.code, c.memory, append(lines, "the last")...)
				o := r.within(2*time.Second, d.Key, "gone", func(o host.Observed) bool { return o.Phase == host.PhaseGone })
				wantReason(t, o, c.want)
				if o.ExitCode == nil || *o.ExitCode != c.code || o.OutOfMemory != c.memory || o.EndedUnattested {
					t.Errorf("%+v", o)
				}
				if len(o.LogTail) != 20 || o.LogTail[19] != "the last" || o.LogTail[0] != "line\uFFFD" {
					t.Errorf("%d lines: %q", len(o.LogTail), o.LogTail)
				}
				var got []string
				if err := r.host.Logs(t.Context(), d.Key, host.LogQuery{Tail: 1}, func(_ time.Time, l string) error { got = append(got, l); return nil }); err != nil || !slices.Equal(got, []string{"the last"}) {
					t.Errorf("logs %q, %v", got, err)
				}
				r.wantNames()
			})
		})
	}
}

// CONT-01: a container that has the name, of each kind.
func TestCONT01NameTaken(t *testing.T) {
	t.Run("not ours", func(t *testing.T) {
		bubble(t, func(t *testing.T, r *rig) {
			r.engine.Put(host.Container{Name: "carrel-w1-1", State: host.StateExited})
			d := run("w1", 1)
			d.Devices = []host.Grant{{ID: simOne, Simulated: true}}
			r.apply(d)
			o := r.gone(d.Key)
			wantReason(t, o, host.ReasonNameTaken)
			if !strings.Contains(o.Reason.Message, "carrel-w1-1") {
				t.Errorf("%q does not name it", o.Reason.Message)
			}
			r.wantNames("carrel-w1-1")
			// The device is free for the next.
			other := run("w2", 1)
			other.Devices = d.Devices
			r.apply(d, other)
			r.ready(other.Key)
		})
	})
	t.Run("ours, never started", func(t *testing.T) {
		bubble(t, func(t *testing.T, r *rig) {
			d := run("w1", 1)
			r.engine.Put(host.Container{Name: "carrel-w1-1", State: host.StateCreated, Labels: r.opts.Signer.Labels(d.Key, d.Devices, d.Mounts)})
			r.apply(d)
			r.ready(d.Key)
			r.wantNames("carrel-w1-1")
		})
	})
	t.Run("labels of ours for another workspace", func(t *testing.T) {
		bubble(t, func(t *testing.T, r *rig) {
			d := run("w1", 1)
			r.engine.Put(host.Container{Name: "carrel-w1-1", State: host.StateExited, Labels: r.opts.Signer.Labels(host.Key{Workspace: "w9", Epoch: 1}, nil, nil)})
			r.apply(d)
			wantReason(t, r.gone(d.Key), host.ReasonNameTaken)
			r.wantNames("carrel-w1-1")
		})
	})
	t.Run("being removed", func(t *testing.T) {
		bubble(t, func(t *testing.T, r *rig) {
			d := run("w1", 1)
			r.apply(d)
			r.ready(d.Key)
			id := r.of(d.Key).ContainerID
			r.engine.Vanish("carrel-w1-1")
			r.engine.Put(host.Container{ID: id, Name: "carrel-w1-1", State: host.StateRemoving, Labels: r.opts.Signer.Labels(d.Key, d.Devices, d.Mounts)})
			pass(5 * time.Second)
			if o := r.of(d.Key); o.Phase == host.PhaseGone {
				t.Errorf("gone while the engine still removes it: %+v", o)
			}
			r.engine.Vanish("carrel-w1-1")
			r.gone(d.Key)
		})
	})
}

// CONT-10, CONT-11, CONT-12: data lies under the volume's id, belongs to the user, and is never walked through.
func TestCONT12Volumes(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		d.Mounts = append(d.Mounts, host.Mount{Volume: "data1", Target: "/data", Name: "data"})
		r.apply(d)
		r.ready(d.Key)
		home := filepath.Join(r.opts.DataDir, "volumes", "v-w1")
		info, err := os.Stat(home)
		if err != nil || info.Mode().Perm() != 0o700 {
			t.Fatalf("%v, %v", info, err)
		}
		parent, err := os.Stat(filepath.Dir(home))
		if err != nil || parent.Mode().Perm() != 0o700 {
			t.Errorf("%v, %v", parent, err)
		}
		if err := os.WriteFile(filepath.Join(home, "keep.txt"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		// Renamed, another image, another epoch: the same data, untouched.
		r.apply(gone(d))
		r.gone(d.Key)
		d.Key.Epoch, d.Goal, d.Name = 2, host.GoalRunning, "renamed"
		r.apply(d)
		r.ready(d.Key)
		spec, _ := r.engine.Spec("carrel-w1-2")
		if spec.Mounts[0].Volume != "carrel-v-w1" || spec.Mounts[1].Volume != "carrel-data1" {
			t.Errorf("mounts %+v", spec.Mounts)
		}
		kept, err := os.Stat(filepath.Join(home, "keep.txt"))
		if err != nil || kept.Sys() == nil {
			t.Fatal(err)
		}
		// Another uid on the same home: a refusal that says what to do.
		other := run("w1", 3)
		other.Identity.UID++
		r.apply(gone(d), other)
		o := r.gone(other.Key)
		wantReason(t, o, host.ReasonRefused)
		if !strings.Contains(o.Reason.Message, "chown") {
			t.Errorf("%q", o.Reason.Message)
		}
	})
}

// CONT-14: a volume whose data is no longer there fails the start once; no empty one takes its place.
func TestCONT14VolumeMissing(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		r.apply(d)
		r.ready(d.Key)
		r.apply(gone(d))
		r.gone(d.Key)
		home := filepath.Join(r.opts.DataDir, "volumes", "v-w1")
		if err := os.Remove(home); err != nil {
			t.Fatal(err)
		}
		again := run("w1", 2)
		r.apply(again)
		wantReason(t, r.gone(again.Key), host.ReasonVolumeMissing)
		if _, err := os.Stat(home); err == nil {
			t.Error("an empty volume was made")
		}
		if n := r.count("Create"); n != 1 {
			t.Errorf("%d containers made", n)
		}
	})
}

// CONT-13, CONT-14: data goes only when it is named, and not while a run writes it.
func TestVolumeGone(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		d := run("w1", 1)
		r.apply(d)
		r.ready(d.Key)
		home := filepath.Join(r.opts.DataDir, "volumes", "v-w1")
		if err := os.WriteFile(filepath.Join(home, "f"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		r.applySet(host.Set{Runs: []host.Desired{d}, VolumesGone: []string{"v-w1"}})
		pass(time.Minute)
		if _, err := os.Stat(filepath.Join(home, "f")); err != nil {
			t.Fatalf("removed while in use: %v", err)
		}
		r.applySet(host.Set{Runs: []host.Desired{gone(d)}, VolumesGone: []string{"v-w1"}})
		r.gone(d.Key)
		pass(5 * time.Second)
		s := r.observe(0)
		if !slices.Equal(s.removed, []string{"v-w1"}) {
			t.Errorf("removed: %v", s.removed)
		}
		if _, err := os.Stat(home); !os.IsNotExist(err) {
			t.Errorf("still there: %v", err)
		}
		trash, err := os.ReadDir(filepath.Join(r.opts.DataDir, "trash"))
		if err != nil || len(trash) != 0 {
			t.Errorf("trash %v, %v", trash, err)
		}
		if again := r.observe(s.seq); len(again.removed) != 0 {
			t.Errorf("told again after it was acknowledged: %v", again.removed)
		}
		r.restart()
		if s := r.observe(0); !slices.Equal(s.removed, []string{"v-w1"}) {
			t.Errorf("after a restart: %v", s.removed)
		}
	})
}
