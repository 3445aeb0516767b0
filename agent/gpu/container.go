package gpu

import (
	"slices"
	"strings"
)

// containerIDLength is the length of a full container id in hexadecimal digits (Docker, containerd, podman).
const containerIDLength = 64

// ContainerID returns the container that a /proc/<pid>/cgroup file places its process in. In nested containers it is the
// outermost: what a workspace starts inside itself is the workspace's.
func ContainerID(cgroup []byte) (string, bool) {
	ids := ContainerIDs(cgroup)
	if len(ids) == 0 {
		return "", false
	}
	return ids[0], true
}

// ContainerIDs returns all container ids in a /proc/<pid>/cgroup file, outermost first and each once. A caller that
// looks for its own container (an engine may itself run in a container) takes the first one it knows: a process can make
// up path elements below its own container only, so an earlier id cannot be forged by it.
//
// It reads cgroup v1 ("4:devices:/docker/ID"), v2 ("0::/system.slice/docker-ID.scope"), the systemd and the cgroupfs
// driver, any parent, and the scopes of podman and containerd ("libpod-ID.scope", "cri-containerd-ID.scope").
func ContainerIDs(cgroup []byte) []string {
	var ids []string
	for line := range strings.Lines(string(cgroup)) {
		parts := strings.SplitN(strings.TrimRight(line, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		var found []string
		for element := range strings.SplitSeq(parts[2], "/") {
			if id, ok := containerElement(element); ok && !slices.Contains(found, id) {
				found = append(found, id)
			}
		}
		// Lines of one file may differ (v1 has one per controller). The first line that names a container is used.
		if len(found) > 0 {
			ids = found
			break
		}
	}
	return ids
}

// containerElement returns the id in one path element: "ID", "docker-ID.scope" or "name-ID".
func containerElement(element string) (string, bool) {
	element = strings.TrimSuffix(element, ".scope")
	if i := strings.LastIndexByte(element, '-'); i >= 0 {
		element = element[i+1:]
	}
	if len(element) != containerIDLength {
		return "", false
	}
	for _, c := range []byte(element) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return "", false
		}
	}
	return element, true
}
