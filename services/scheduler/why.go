package scheduler

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/carrel-dev/carrel/services/fleet"
)

// listed is how many holders or hosts a reason names before it counts the rest.
const listed = 4

// class sorts what keeps a run off a host by how close the host is to taking it; the closest one is the reason.
type class int

const (
	classAway    class = iota // does not answer, or takes nothing new
	classLacks                // never has enough devices
	classImage                // driver or device too old for the image
	classDisk                 // disk full
	classInUse                // others hold the devices
	classClaimed              // kept for somebody who has waited long
	classRoom                 // devices free, CPU or memory not
	classes
)

// explain writes a Wait for each run that stays in the queue.
func (p *pass) explain() {
	waiting := 0
	for i := range p.queue {
		if e := &p.queue[i]; !e.decided {
			e.line.length++
			waiting++
		}
	}
	p.plan.Waits = make([]fleet.Wait, 0, waiting)
	held := p.holdings()
	for i := range p.queue {
		e := &p.queue[i]
		if e.decided {
			continue
		}
		e.line.place++
		p.plan.Waits = append(p.plan.Waits, fleet.Wait{Run: e.Run, Place: e.line.place, Length: e.line.length, Why: p.why(e, held)})
	}
}

func (p *pass) why(e *entry, held map[string]*tally) string {
	switch {
	case e.BusyVolume != "":
		return "it waits for volume " + e.BusyVolume
	case e.KeepHost != "":
		return p.whyKept(e.Request)
	case e.overLimit():
		return limitText(e.GPULimit, e.account.held, held[e.UserName])
	}
	sh := p.shapeOf(e)
	if sh.why == "" {
		sh.why = p.whyShape(e.Request, sh)
	}
	if len(p.reserved) == 0 {
		return sh.why
	}
	if own := p.reserved[e.Run]; own != nil && own.count > 0 {
		return fmt.Sprintf("%s; %d of the %s it needs are being kept for it on %s", sh.why, len(own.devices), gpus(own.count, nil), own.host.view.Name)
	}
	return sh.why
}

func (p *pass) whyKept(r *fleet.Request) string {
	h := p.byID[r.KeepHost]
	switch {
	case h == nil:
		return "it restarts with its GPUs, but their host is gone; stop and start it"
	case !h.view.Usable:
		return "it restarts with its GPUs on " + h.view.Name + ": " + hostAway(h)
	}
	return "it restarts with its GPUs on " + h.view.Name + ": " + p.roomText(r, h)
}

func limitText(limit, used int, held *tally) string {
	text := fmt.Sprintf("your limit is %s at once and %d are in use", gpus(limit, nil), used)
	if list := held.text("%s (%d)"); list != "" { // the user's own workspaces, whose names nobody else is told
		text += ": " + list
	}
	return text
}

// whyShape says why no request of this shape starts now.
func (p *pass) whyShape(r *fleet.Request, sh *shape) string {
	hosts, prefix := sh.pool.hosts, ""
	if sh.pinned != nil {
		hosts, prefix = []*host{sh.pinned}, pinText(r, sh.pinned)
	}
	if sh.lost {
		return lostText(r, sh)
	}
	if len(hosts) == 0 {
		return "pool " + sh.pool.name + " has no hosts yet"
	}
	var by [classes][]*host
	for _, h := range hosts {
		c := p.classOf(r, sh, h)
		by[c] = append(by[c], h)
	}
	text := ""
	for c := classRoom; c > classAway && text == ""; c-- {
		if len(by[c]) > 0 {
			text = p.classText(c, r, sh, by[c], hosts)
		}
	}
	if away := p.awayText(by[classAway], sh, r.Spec.GPU.Count, text == ""); away != "" {
		text = strings.TrimPrefix(text+"; "+away, "; ")
	}
	return prefix + text
}

// pinText names what ties a run to a host.
func pinText(r *fleet.Request, h *host) string {
	if r.HomeHost != "" {
		return homeText(r, h.view.Name) + ": "
	}
	return "image " + r.Spec.Image + " exists only on " + h.view.Name + ": "
}

func homeText(r *fleet.Request, host string) string {
	if ownHome(r) {
		return "your home is on " + host
	}
	return "your volume " + r.HomeVolume + " is on " + host
}

// ownHome reports whether what ties the run to a host is the home of its workspace.
func ownHome(r *fleet.Request) bool { return r.HomeVolume == "" || r.HomeVolume == r.Name+"-home" }

func lostText(r *fleet.Request, sh *shape) string {
	switch {
	case sh.pinned == nil:
		return "the host of its home or image is gone; ask an admin"
	case sh.pinned.pool != sh.pool:
		return fmt.Sprintf("%swhich serves pool %s, not %s", strings.Replace(pinText(r, sh.pinned), ": ", ", ", 1), sh.pinned.pool.name, sh.pool.name)
	}
	return homeText(r, sh.pinned.view.Name) + ", but image " + r.Spec.Image + " exists only on another host"
}

// classOf says what keeps the shape off a host.
func (p *pass) classOf(r *fleet.Request, sh *shape, h *host) class {
	count := r.Spec.GPU.Count
	if !h.view.Usable {
		return classAway
	}
	best := classLacks
	if count == 0 {
		best = classRoom
		if h.claim != nil && h.claim.count == 0 && h.claim.run != r.Run {
			best = classClaimed
		}
	}
	for _, m := range sh.models {
		best = max(best, p.classOfModel(r, sh, h, m))
	}
	if best > classDisk && p.diskFull(h) {
		return classDisk
	}
	return best
}

func (p *pass) classOfModel(r *fleet.Request, sh *shape, h *host, m *model) class {
	st := h.stock(m.name)
	switch count := r.Spec.GPU.Count; {
	case st == nil || st.leasable < count:
		return classLacks
	case !sh.require.holds(h.facts(m.name)):
		return classImage
	case len(st.free) >= count:
		if h.claim != nil && h.claim.count > 0 && h.claim.run != r.Run {
			return classClaimed
		}
		return classRoom
	case h.claim != nil && h.claim.model == m && h.claim.run != r.Run && len(st.free)+len(h.claim.devices) >= count:
		return classClaimed
	case h.claim != nil && h.claim.run == r.Run && len(h.claim.devices) >= count:
		return classRoom
	}
	return classInUse
}

func (p *pass) classText(c class, r *fleet.Request, sh *shape, hosts, all []*host) string {
	switch c {
	case classRoom:
		return p.roomText(r, hosts[0])
	case classClaimed:
		return claimedText(hosts[0])
	case classDisk:
		return fmt.Sprintf("disk: %s has %d MiB free and needs %d", hosts[0].view.Name, hosts[0].view.DiskFreeMiB, p.set.MinDiskFreeMiB)
	case classImage:
		return p.imageText(r, sh, hosts)
	case classInUse:
		return p.inUseText(r, sh, all)
	default:
		return p.lacksText(r, sh, all)
	}
}

func claimedText(h *host) string {
	res := h.claim
	if len(res.devices) == 0 {
		return fmt.Sprintf("what is free on %s is being kept for a workspace of %s, which has waited longer", h.view.Name, res.user)
	}
	return fmt.Sprintf("%s free on %s are being kept for a workspace of %s, which has waited longer", gpus(len(res.devices), nil), h.view.Name, res.user)
}

// roomText says how much CPU or memory is missing on a host.
func (p *pass) roomText(r *fleet.Request, h *host) string {
	want, count := p.sizes(r, h), r.Spec.GPU.Count
	left, where := h.left(count), h.view.Name
	if count == 0 && len(h.view.Devices) > 0 {
		where += " for workspaces without GPUs"
	}
	if want.cpu > left.cpu {
		return fmt.Sprintf("CPU: it needs %s cores and %s are free on %s", cores(want.cpu), cores(max(0, left.cpu)), where)
	}
	return fmt.Sprintf("memory: it needs %s and %s are free on %s", gib(want.memory), gib(max(0, left.memory)), where)
}

// inUseText says which users hold how many of the devices. What their workspaces are called is theirs.
func (p *pass) inUseText(r *fleet.Request, sh *shape, hosts []*host) string {
	holders, leasable, free, most := &tally{}, 0, 0, 0
	mostOn := ""
	for _, h := range hosts {
		if !h.view.Usable {
			continue
		}
		for _, m := range sh.models {
			st := h.stock(m.name)
			if st == nil {
				continue
			}
			leasable += st.leasable
			free += len(st.free)
			if len(st.free) > most {
				most, mostOn = len(st.free), h.view.Name
			}
			holders.addHolders(h, m.name)
		}
	}
	scope := "pool " + sh.pool.name
	if sh.pinned != nil {
		scope = "host " + sh.pinned.view.Name
	}
	models := r.Spec.GPU.Models
	text := ""
	switch {
	case free == 0 && leasable == 1:
		text = fmt.Sprintf("the one %s of %s is in use", gpuWord(1, models), scope)
	case free == 0:
		text = fmt.Sprintf("all %s of %s are in use", gpus(leasable, models), scope)
	default:
		text = fmt.Sprintf("it needs %s on one host and at most %d are free on one (%s)", gpus(r.Spec.GPU.Count, models), most, mostOn)
	}
	if list := holders.text("%s %d"); list != "" {
		text += map[bool]string{true: ": ", false: "; in use by "}[free == 0] + list
	}
	return text
}

// lacksText is for pools whose answering hosts have too few devices that can be leased.
func (p *pass) lacksText(r *fleet.Request, sh *shape, hosts []*host) string {
	most, why := 0, ""
	for _, h := range hosts {
		for _, m := range sh.models {
			if st := h.stock(m.name); st != nil && h.view.Usable {
				most = max(most, st.leasable)
			}
		}
		for i := range h.view.Devices {
			if d := &h.view.Devices[i]; why == "" && h.view.Usable && !d.Leasable && sh.wants(d.Model) {
				why = fmt.Sprintf("; %s on %s cannot be leased: %s", d.ID, h.view.Name, d.Why)
			}
		}
	}
	return fmt.Sprintf("it needs %s on one host, and no host that answers has more than %d that can be leased%s", gpus(r.Spec.GPU.Count, r.Spec.GPU.Models), most, why)
}

func (sh *shape) wants(name string) bool {
	return slices.ContainsFunc(sh.models, func(m *model) bool { return m.name == name })
}

// imageText says which rule of the image failed on which host.
func (p *pass) imageText(r *fleet.Request, sh *shape, hosts []*host) string {
	var parts []string
	for _, h := range hosts[:min(len(hosts), listed)] {
		parts = append(parts, fmt.Sprintf("%s has CUDA %s, driver %s", h.view.Name, cmp.Or(h.view.CUDAVersion, "unknown"), cmp.Or(h.view.DriverVersion, "unknown")))
	}
	if more := len(hosts) - listed; more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more hosts", more))
	}
	return fmt.Sprintf("no host can run image %s: it needs %s; %s", r.Spec.Image, sh.require.text, strings.Join(parts, "; "))
}

// awayText names hosts that would do but take nothing now.
func (p *pass) awayText(hosts []*host, sh *shape, count int, alone bool) string {
	var parts []string
	for _, h := range hosts {
		if !alone && count > 0 && !slices.ContainsFunc(sh.models, func(m *model) bool { st := h.stock(m.name); return st != nil && st.total >= count }) {
			continue
		}
		if len(parts) == listed {
			parts = append(parts, "and more hosts")
			break
		}
		parts = append(parts, hostAway(h))
	}
	return strings.Join(parts, "; ")
}

func hostAway(h *host) string {
	why := cmp.Or(h.view.Why, "takes no new work")
	if strings.HasPrefix(why, "does ") || strings.HasPrefix(why, "takes ") {
		return "host " + h.view.Name + " " + why
	}
	return "host " + h.view.Name + ": " + why
}

// tally counts devices by holder.
type tally struct {
	names  []string
	counts map[string]int
}

func (t *tally) add(name string, n int) {
	if t.counts == nil {
		t.counts = map[string]int{}
	}
	if t.counts[name] == 0 {
		t.names = append(t.names, name)
	}
	t.counts[name] += n
}

// addHolders counts a host's held devices of a model by user.
func (t *tally) addHolders(h *host, model string) {
	for i := range h.view.Devices {
		d := &h.view.Devices[i]
		if d.Model != model {
			continue
		}
		if user, _, _ := strings.Cut(cmp.Or(h.placed[d.ID], d.HeldBy), "/"); user != "" {
			t.add(user, 1)
		}
	}
}

// text lists the largest holders first, each written by a format that takes name and count.
func (t *tally) text(format string) string {
	if t == nil || len(t.names) == 0 {
		return ""
	}
	slices.SortFunc(t.names, func(a, b string) int { return cmp.Or(cmp.Compare(t.counts[b], t.counts[a]), cmp.Compare(a, b)) })
	var parts []string
	for _, name := range t.names[:min(len(t.names), listed)] {
		parts = append(parts, fmt.Sprintf(format, name, t.counts[name]))
	}
	if more := len(t.names) - listed; more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(parts, ", ")
}

// holdings counts devices by workspace for each user that has reached the limit.
func (p *pass) holdings() map[string]*tally {
	out := map[string]*tally{}
	for i := range p.queue {
		if e := &p.queue[i]; !e.decided && e.overLimit() {
			out[e.UserName] = &tally{}
		}
	}
	if len(out) == 0 {
		return out
	}
	for _, h := range p.hosts {
		for i := range h.view.Devices {
			d := &h.view.Devices[i]
			user, name, ok := strings.Cut(cmp.Or(h.placed[d.ID], d.HeldBy), "/")
			if t := out[user]; ok && t != nil {
				t.add(name, 1)
			}
		}
	}
	return out
}

// gpus is a count of devices in words.
func gpus(n int, models []string) string { return strconv.Itoa(n) + " " + gpuWord(n, models) }

func gpuWord(n int, models []string) string {
	word := "GPUs"
	if n == 1 {
		word = "GPU"
	}
	if len(models) > 0 {
		return strings.Join(models, " or ") + " " + word
	}
	return word
}

// cores is thousandths of a core as a number of cores.
func cores(millis int64) string { return strconv.FormatFloat(float64(millis)/1000, 'g', 4, 64) }

// gib is MiB as GiB, or as MiB when it is less than one.
func gib(mib int64) string {
	if mib < 1024 {
		return fmt.Sprintf("%d MiB", mib)
	}
	return strconv.FormatFloat(float64(mib)/1024, 'g', 4, 64) + " GiB"
}
