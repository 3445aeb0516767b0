package host_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/host"
	"github.com/carrel-dev/carrel/agent/host/hosttest"
)

const remoteName = "registry.example.com/team/new"

// remote puts an image into the registry, fetched as feed says.
func (r *rig) remote(feed func(ctx context.Context, each func(host.PullProgress)) error) {
	r.engine.AddRemote(&hosttest.Remote{
		Image: host.Image{ID: hosttest.ID("new"), Bytes: 1000}, Digest: hosttest.ID("new-digest"), Feed: feed,
	}, remoteName+":1", remoteName+"@"+hosttest.ID("new-digest"))
}

func pulled(workspace string, epoch int64) host.Desired {
	d := run(workspace, epoch)
	d.ImageReference, d.ImageDigest = remoteName+":1", hosttest.ID("new-digest")
	return d
}

func TestPullTellsItsProgress(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.remote(func(_ context.Context, each func(host.PullProgress)) error {
			for i := range 10 {
				pass(time.Second)
				each(host.PullProgress{Done: int64(i) * 100, Total: 1000, Moment: fmt.Sprint(i)})
			}
			return nil
		})
		d := pulled("w1", 1)
		r.apply(d)
		r.within(8*time.Second, d.Key, "half way", func(o host.Observed) bool {
			return o.Phase == host.PhasePulling && o.PullDone >= 500 && o.PullTotal == 1000
		})
		r.ready(d.Key)
	})
}

// CONT-03: a pull that fails is told with the registry's word; an older image of the same name is not taken for it.
func TestCONT03PullFails(t *testing.T) {
	for kind, want := range map[host.Kind]string{
		host.KindNotFound: host.ReasonImageNotFound, host.KindDenied: host.ReasonPullFailed,
		host.KindNoSpace: host.ReasonDiskFull, host.KindInternal: host.ReasonPullFailed,
	} {
		t.Run(string(kind), func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				broken := true
				r.remote(func(context.Context, func(host.PullProgress)) error {
					if broken {
						return host.Errorf(kind, "the registry's word")
					}
					return nil
				})
				r.engine.AddImage(host.Image{ID: hosttest.ID("old"), Digests: []string{remoteName + "@" + hosttest.ID("old-digest")}}, remoteName+":1")
				d := pulled("w1", 1)
				r.apply(d)
				o := r.gone(d.Key)
				wantReason(t, o, want)
				if !strings.Contains(o.Reason.Message, "the registry's word") {
					t.Errorf("%q", o.Reason.Message)
				}
				r.wantNames()
				broken = false
				again := pulled("w1", 2)
				r.apply(d, again)
				r.ready(again.Key)
				if spec, _ := r.engine.Spec("carrel-w1-2"); spec.Image != hosttest.ID("new") {
					t.Errorf("it runs %s", spec.Image)
				}
			})
		})
	}
}

// CONT-04: no progress ends a pull, slowness does not; who gives up is rid of it at once.
func TestCONT04StalledAndSlow(t *testing.T) {
	t.Run("stalled", func(t *testing.T) {
		bubble(t, func(t *testing.T, r *rig) {
			r.remote(func(ctx context.Context, each func(host.PullProgress)) error {
				each(host.PullProgress{Done: 1, Total: 1000, Moment: "1"})
				for {
					select {
					case <-ctx.Done():
						return ctx.Err()
					case <-time.After(time.Second):
						each(host.PullProgress{Done: 1, Total: 1000, Moment: "1"}) // it talks, and nothing moves
					}
				}
			})
			d := pulled("w1", 1)
			r.apply(d)
			o := r.within(200*time.Second, d.Key, "gone", func(o host.Observed) bool { return o.Phase == host.PhaseGone })
			wantReason(t, o, host.ReasonPullFailed)
			if !strings.Contains(o.Reason.Message, "no progress since") {
				t.Errorf("%q", o.Reason.Message)
			}
		})
	})
	t.Run("slow", func(t *testing.T) {
		bubble(t, func(t *testing.T, r *rig) {
			r.remote(func(_ context.Context, each func(host.PullProgress)) error {
				for i := range 15 {
					pass(time.Minute)
					each(host.PullProgress{Done: int64(i), Total: 1000, Moment: fmt.Sprint(i)})
				}
				return nil
			})
			d := pulled("w1", 1)
			r.apply(d)
			r.within(16*time.Minute, d.Key, "ready", func(o host.Observed) bool { return o.Phase == host.PhaseReady })
		})
	})
	t.Run("given up", func(t *testing.T) {
		bubble(t, func(t *testing.T, r *rig) {
			ended := make(chan struct{})
			r.remote(func(ctx context.Context, _ func(host.PullProgress)) error {
				<-ctx.Done()
				close(ended)
				return ctx.Err()
			})
			d := pulled("w1", 1)
			d.Devices = []host.Grant{{ID: simOne, Simulated: true}}
			r.apply(d)
			r.within(time.Second, d.Key, "pulling", func(o host.Observed) bool { return o.Phase == host.PhasePulling })
			r.apply(gone(d))
			wantReason(t, r.within(time.Second, d.Key, "gone", func(o host.Observed) bool { return o.Phase == host.PhaseGone }), host.ReasonStopped)
			<-ended
		})
	})
}

// CONT-05: two wait for one image; one gives up and the other gets it, by one download; a failure is told to both.
func TestCONT05SharedPull(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		release := make(chan error)
		r.remote(func(ctx context.Context, each func(host.PullProgress)) error {
			each(host.PullProgress{Done: 300, Total: 1000, Moment: "300"})
			select {
			case err := <-release:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		ana, bo := pulled("w1", 1), pulled("w2", 1)
		r.apply(ana, bo)
		for _, d := range []host.Desired{ana, bo} {
			r.within(5*time.Second, d.Key, "pulling", func(o host.Observed) bool { return o.Phase == host.PhasePulling })
		}
		r.apply(gone(ana), bo)
		r.within(time.Second, ana.Key, "gone", func(o host.Observed) bool { return o.Phase == host.PhaseGone })
		release <- host.Errorf(host.KindInternal, "layer is broken")
		wantReason(t, r.gone(bo.Key), host.ReasonPullFailed)
		if n := r.count("Pull"); n != 1 {
			t.Errorf("%d downloads", n)
		}
		both := []host.Desired{pulled("w3", 1), pulled("w4", 1)}
		r.apply(both...)
		pass(5 * time.Second)
		release <- host.Errorf(host.KindInternal, "layer is broken")
		for _, d := range both {
			if o := r.gone(d.Key); !strings.Contains(o.Reason.Message, "layer is broken") {
				t.Errorf("%+v", o.Reason)
			}
		}
		last := pulled("w5", 1)
		r.apply(last)
		pass(time.Second)
		release <- nil
		r.ready(last.Key)
	})
}

// CONT-06: what runs is the digest, wherever the tag points and also when it is gone.
func TestCONT06TagMoves(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.remote(nil)
		d := pulled("w1", 1)
		r.apply(d)
		r.ready(d.Key)
		r.engine.AddImage(host.Image{ID: hosttest.ID("other")}, remoteName+":1")
		r.engine.AddRemote(nil, remoteName+":1")
		pulls := r.count("Pull")
		r.apply(gone(d))
		r.gone(d.Key)
		again := pulled("w1", 2)
		r.apply(again)
		r.ready(again.Key)
		if spec, _ := r.engine.Spec("carrel-w1-2"); spec.Image != hosttest.ID("new") || r.count("Pull") != pulls {
			t.Errorf("it runs %s", spec.Image)
		}
	})
}

func TestResolveImage(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		local := host.Image{ID: hosttest.ID("local"), Env: []string{"NVIDIA_REQUIRE_CUDA=cuda>=12.4"}, Labels: map[string]string{"a": "b"}, Bytes: 7}
		r.engine.AddImage(local, "carrel/base:local")
		cached := host.Image{ID: hosttest.ID("cached"), Digests: []string{"registry.example.com/c@" + hosttest.ID("cached-digest")}}
		r.engine.AddImage(cached, "registry.example.com/c:1")
		r.remote(nil)
		for ref, want := range map[string]host.Resolved{
			"carrel/base:local":        {Digest: local.ID, Present: true, LocalOnly: true, RequireCUDA: "cuda>=12.4", Labels: local.Labels, Bytes: 7},
			local.ID:                   {Digest: local.ID, Present: true, LocalOnly: true, RequireCUDA: "cuda>=12.4", Labels: local.Labels, Bytes: 7},
			"registry.example.com/c:1": {Digest: hosttest.ID("cached-digest"), Present: true},
			remoteName + ":1":          {Digest: hosttest.ID("new-digest")},
		} {
			got, err := r.host.ResolveImage(t.Context(), ref)
			if err != nil || got.Digest != want.Digest || got.Present != want.Present || got.LocalOnly != want.LocalOnly ||
				got.RequireCUDA != want.RequireCUDA || got.Labels["a"] != want.Labels["a"] || got.Bytes != want.Bytes {
				t.Errorf("%s: %+v, %v", ref, got, err)
			}
		}
		for ref, kind := range map[string]host.Kind{
			"registry.example.com/none:1": host.KindNotFound, hosttest.ID("none"): host.KindNotFound, "": host.KindInvalid, "a b": host.KindInvalid,
		} {
			if _, err := r.host.ResolveImage(t.Context(), ref); host.KindOf(err) != kind {
				t.Errorf("%q: %v", ref, err)
			}
		}
	})
}
