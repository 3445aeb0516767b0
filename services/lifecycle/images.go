package lifecycle

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/carrel-dev/carrel/services/fleet"
)

// asked is how many hosts are asked about an image at a time.
const asked = 8

// pinImage settles a spec's image before placement (DESIGN D13): which image the name stands for, whether policy allows it, its digest,
// what it asks of a driver, and the one host that has it if no registry does. from says where the name came from.
func (l *Lifecycle) pinImage(ctx context.Context, spec *fleet.Spec, pool fleet.Pool) (from string, err error) {
	images, err := l.reader.Images(ctx)
	if err != nil {
		return "", err
	}
	from = originAsked
	if spec.Image == "" {
		if spec.Image, from = l.defaultImage(images, pool); spec.Image == "" {
			return "", fleet.Errorf(fleet.KindInvalid, "no image is named, and pool %s has no default one; name one of the catalogue%s", pool.Name, catalogueText(images))
		}
	}
	reference := spec.Image
	at := slices.IndexFunc(images, func(i fleet.Image) bool { return i.Name == spec.Image })
	if at >= 0 {
		entry := images[at]
		spec.ImageDigest, spec.ImageHost, spec.RequireCUDA = entry.Digest, entry.Host, entry.RequireCUDA
		if entry.Digest != "" {
			return from, nil
		}
		reference = entry.Reference
	} else if err := l.allowImage(reference, images); err != nil {
		return "", err
	}
	found, host, err := l.resolve(ctx, pool.Name, reference)
	if err != nil {
		return "", err
	}
	spec.ImageDigest, spec.ImageHost, spec.RequireCUDA = found.Digest, host, cmp.Or(found.RequireCUDA, spec.RequireCUDA)
	return from, nil
}

// defaultImage is the image of a workspace that names none: the pool's, else the catalogue's, else the one in the settings file.
func (l *Lifecycle) defaultImage(images []fleet.Image, pool fleet.Pool) (name, from string) {
	if pool.DefaultImage != "" {
		return pool.DefaultImage, "default of pool " + pool.Name
	}
	for _, i := range images {
		if i.Default {
			return i.Name, "default of the catalogue"
		}
	}
	return l.set.DefaultImage, originDefault
}

// allowImage holds a reference that the catalogue does not name against policy.
func (l *Lifecycle) allowImage(reference string, images []fleet.Image) error {
	switch l.set.Images {
	case ImagesAny:
		return nil
	case ImagesRegistries:
		name := normalReference(reference)
		for _, r := range l.set.Registries {
			if strings.HasPrefix(name, strings.TrimSuffix(r, "/")+"/") {
				return nil
			}
		}
		return fleet.Errorf(fleet.KindForbidden, "image %s comes from a registry that is not allowed here; allowed are %s%s",
			clip(reference), strings.Join(l.set.Registries, ", "), catalogueText(images))
	case ImagesCatalogue:
	}
	return fleet.Errorf(fleet.KindInvalid, "there is no image %s in the catalogue%s", clip(reference), catalogueText(images))
}

// normalReference completes a reference as the engine does: no registry means docker.io, and there one word means library/WORD
// (distribution/reference, "normalized.go").
func normalReference(reference string) string {
	first, rest, slash := strings.Cut(reference, "/")
	if slash && (strings.ContainsAny(first, ".:") || first == "localhost") {
		if first == "index.docker.io" {
			first = "docker.io"
		}
		return first + "/" + rest
	}
	if !slash {
		return "docker.io/library/" + reference
	}
	return "docker.io/" + reference
}

func catalogueText(images []fleet.Image) string {
	if len(images) == 0 {
		return "; the catalogue is empty, an admin adds to it with `carrel image add`"
	}
	var names []string
	for _, i := range images {
		names = append(names, i.Name)
	}
	slices.Sort(names)
	if len(names) > 8 {
		return fmt.Sprintf("; it has %s and %d more (`carrel image ls`)", strings.Join(names[:8], ", "), len(names)-8)
	}
	return "; it has " + strings.Join(names, ", ")
}

// Resolve asks the connected hosts of all pools what a reference stands for. The host is set when the image exists on that one only.
func (l *Lifecycle) Resolve(ctx context.Context, reference string) (fleet.ResolvedImage, fleet.HostID, error) {
	return l.resolve(ctx, "", reference)
}

// resolve asks the connected hosts of a pool. A registry's answer is as good from one as from another; what only engines have is looked
// for on all.
func (l *Lifecycle) resolve(ctx context.Context, pool, reference string) (fleet.ResolvedImage, fleet.HostID, error) {
	ctx, cancel := context.WithTimeout(ctx, l.set.ResolveTimeout)
	defer cancel()
	hosts, err := l.connectedHosts(ctx, pool)
	if err != nil {
		return fleet.ResolvedImage{}, "", err
	}
	answers := make([]answer, 0, len(hosts))
	for batch := range slices.Chunk(hosts, asked) {
		answers = append(answers, l.askHosts(ctx, batch, reference)...)
		for _, a := range answers {
			if a.err == nil && !a.image.LocalOnly {
				return a.image, "", nil
			}
		}
	}
	return pick(answers, reference)
}

// answer is what one host said of a reference.
type answer struct {
	host  fleet.Host
	image fleet.ResolvedImage
	err   error
}

func (l *Lifecycle) askHosts(ctx context.Context, hosts []fleet.Host, reference string) []answer {
	answers := make([]answer, len(hosts))
	var group sync.WaitGroup
	for i, h := range hosts {
		group.Go(func() {
			image, err := l.hosts.ResolveImage(ctx, h.ID, reference)
			answers[i] = answer{h, image, err}
		})
	}
	group.Wait()
	return answers
}

// pick chooses among answers of which none came from a registry.
func pick(answers []answer, reference string) (fleet.ResolvedImage, fleet.HostID, error) {
	var local []answer
	var failed error
	for _, a := range answers {
		switch {
		case a.err == nil:
			local = append(local, a)
		case !fleet.IsKind(a.err, fleet.KindNotFound):
			failed = a.err
		}
	}
	switch {
	case len(local) == 0 && failed != nil:
		return fleet.ResolvedImage{}, "", fleet.Wrap(failed, kindOr(failed, fleet.KindUnavailable), "image %s could not be looked up: %s", clip(reference), fleet.UserMessage(failed))
	case len(local) == 0:
		return fleet.ResolvedImage{}, "", fleet.Errorf(fleet.KindNotFound, "image %s was not found: no registry that the hosts can reach has it, and no host has it; check its name", clip(reference))
	}
	everywhere := len(local) == len(answers) && !slices.ContainsFunc(local, func(a answer) bool { return a.image.Digest != local[0].image.Digest })
	if everywhere && len(local) > 1 {
		return local[0].image, "", nil
	}
	return local[0].image, local[0].host.ID, nil
}

func kindOr(err error, fallback fleet.Kind) fleet.Kind {
	if kind := fleet.KindOf(err); kind != fleet.KindInternal {
		return kind
	}
	return fallback
}

// connectedHosts returns the hosts of a pool ("": of all) that answer, by name. After a start of the gateway it waits for the first one.
func (l *Lifecycle) connectedHosts(ctx context.Context, pool string) ([]fleet.Host, error) {
	for {
		l.mu.Lock()
		linked := l.linked
		l.mu.Unlock()
		all, err := l.reader.Hosts(ctx)
		if err != nil {
			return nil, err
		}
		var out []fleet.Host
		for _, h := range all {
			if (pool == "" || h.Pool == pool) && l.Connected(h.ID) {
				out = append(out, h)
			}
		}
		if len(out) > 0 {
			slices.SortFunc(out, func(a, b fleet.Host) int { return cmp.Compare(a.Name, b.Name) })
			return out, nil
		}
		select {
		case <-linked:
		case <-ctx.Done():
			where := "no host"
			if pool != "" {
				where = "no host of pool " + pool
			}
			return nil, fleet.Wrap(ctx.Err(), fleet.KindUnavailable, "%s is connected, so the image cannot be looked up; try again, or see `carrel host ls`", where)
		}
	}
}
