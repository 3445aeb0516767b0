package host

import (
	"context"
	"fmt"
	"time"
)

// start makes the run's container; the next step sees to it from there.
func (w *worker) start(ctx context.Context, d *Desired) next {
	h := w.host
	if why := h.refuse(d); why != "" {
		return w.doom(Reason{ReasonRefused, why})
	}
	if n, ok := w.gpuRuntime(d); !ok {
		return n
	}
	image, n, ok := w.fetch(ctx, d)
	if !ok {
		return n
	}
	if busy := h.take(d); busy != "" {
		w.passing(Reason{ReasonDeviceBusy, busy})
		return next{after: h.opts.Times.Wait}
	}
	for _, m := range d.Mounts {
		if m.Volume == "" {
			continue
		}
		reason, err := h.ensureVolume(ctx, m, d.Identity)
		if h.heard(err) != nil {
			return w.retry("prepare volume "+m.Name, err)
		}
		if reason.Code != "" {
			return w.doom(reason)
		}
	}
	return w.create(ctx, d, image)
}

// gpuRuntime holds back a run with real devices until it is known that the engine gives them to containers.
func (w *worker) gpuRuntime(d *Desired) (n next, ok bool) {
	for _, g := range d.Devices {
		if g.Simulated {
			continue
		}
		switch why, tried := w.host.probedGPU(); {
		case !tried:
			w.passing(Reason{ReasonHostFault, "this host is still finding out whether its engine gives GPUs to containers"})
			return next{after: w.host.opts.Times.Wait}, false
		case why != "":
			return w.doom(Reason{ReasonGPURuntime, "GPU runtime missing: " + why}), false
		}
	}
	return next{}, true
}

// fetch returns the image, pulling it where the engine does not have it. Without ok, what to do next.
func (w *worker) fetch(ctx context.Context, d *Desired) (image Image, n next, ok bool) {
	h := w.host
	image, err := h.present(ctx, d)
	switch h.answered(err) {
	case "":
		return image, next{}, true
	case KindNotFound:
	default:
		return image, w.retry("look for the image", err), false
	}
	if free, err := h.diskFree(); err == nil && free < h.opts.Policy.ReserveDiskMiB {
		return image, w.doom(Reason{ReasonDiskFull, fmt.Sprintf(
			"this host has %d MiB of disk left, less than the %d that it keeps free; an admin must make room", free, h.opts.Policy.ReserveDiskMiB)}), false
	}
	if isImageID(d.ImageReference) {
		return image, w.doom(Reason{ReasonImageNotFound, fmt.Sprintf("image %s is not on this host, and no registry has it", d.ImageReference)}), false
	}
	err = w.pull(ctx, d)
	if err == nil {
		return image, next{}, false // look again
	}
	if kind := h.answered(err); kind != KindUnavailable && ctx.Err() == nil {
		if reason, final := fetchFailed(d, err); final && context.Cause(ctx) == nil && !isChanged(err) {
			return image, w.doom(reason), false
		}
	}
	return image, w.retry("pull the image", err), false
}

func (w *worker) pull(ctx context.Context, d *Desired) error {
	h := w.host
	if err := w.phase(PhasePulling, func(r *Record) { r.pullDone, r.pullTotal = 0, 0 }); err != nil {
		return err
	}
	waiting, done := w.waiting(ctx)
	defer done()
	if now, _ := h.desiredOf(w.key); now == nil || now.Goal != GoalRunning {
		return errChanged
	}
	return h.puller.fetch(ctx, waiting, repository(d.ImageReference)+"@"+d.ImageDigest, func(p PullProgress) {
		if time.Since(w.reported) < h.opts.Times.Progress || p.Done == 0 && p.Total == 0 {
			return
		}
		w.reported = time.Now()
		h.journal.Change(w.key, func(r *Record) { r.pullDone, r.pullTotal = p.Done, p.Total })
	})
}

// create makes and starts the container. What it is known by is on disk before it runs.
func (w *worker) create(ctx context.Context, d *Desired, image Image) next {
	h := w.host
	dir, err := h.inside.Prepare(w.key)
	if err != nil {
		return w.retry("prepare the link to carrel-init", err)
	}
	err = w.phase(PhaseStarting, func(r *Record) {
		r.ImageDigest, r.Devices, r.Volumes = d.ImageDigest, d.Devices, writes(d)
	})
	if err != nil {
		return w.retry("write its journal", err)
	}
	id, err := h.runtime.Create(ctx, h.spec(d, image, dir))
	switch h.answered(err) {
	case "":
	case KindConflict, KindNotFound, KindUnavailable:
		// Somebody has the name, or the image went, or who knows: look again.
		return w.retry("make the container", err)
	default:
		return w.doom(startFailed(d, err))
	}
	h.journal.Change(w.key, func(r *Record) { r.ContainerID = id })
	if err := h.journal.Commit(); err != nil {
		return w.retry("write its journal", err)
	}
	w.created = id
	return w.launch(ctx, d, id)
}

// launch starts a container that this worker made.
func (w *worker) launch(ctx context.Context, d *Desired, id string) next {
	h := w.host
	err := h.runtime.Start(ctx, id)
	switch h.answered(err) {
	case "":
		w.failures = 0
		return next{}
	case KindConflict, KindNotFound, KindUnavailable:
		return w.retry("start the container", err)
	default:
	}
	return w.doom(startFailed(d, err))
}

func startFailed(d *Desired, err error) Reason {
	if KindOf(err) == KindNoSpace {
		return Reason{ReasonDiskFull, fmt.Sprintf("the disk of this host is full; an admin must make room, then start again: %v", err)}
	}
	for _, g := range d.Devices {
		if !g.Simulated {
			return Reason{ReasonStartFailed, fmt.Sprintf("the container engine could not start it with its GPUs: %v", err)}
		}
	}
	return Reason{ReasonStartFailed, fmt.Sprintf("the container engine could not start it: %v", err)}
}

func isImageID(ref string) bool { return digestPattern.MatchString(ref) }
