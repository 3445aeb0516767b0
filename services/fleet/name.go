package fleet

import (
	"regexp"
	"strings"
)

// Longest names, so that `<app>--<workspace>--<user>` fits one DNS label of 63 octets (RFC 1035, 2.3.4).
const (
	MaxNameLength  = 22
	MaxLoginLength = 32
)

var (
	namePattern      = regexp.MustCompile(`^[a-z]([a-z0-9-]*[a-z0-9])?$`)
	loginPattern     = regexp.MustCompile(`^[a-z_][a-z0-9_.-]*$`)
	imageNamePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$`)
)

// CheckName says what is wrong with a name of a workspace, user, pool or project; what is the noun for the message.
func CheckName(what, name string) error {
	switch {
	case name == "":
		return Errorf(KindInvalid, "a %s needs a name", what)
	case len(name) > MaxNameLength:
		return Errorf(KindInvalid, "%s name %q has %d characters; at most %d are allowed", what, clip(name), len(name), MaxNameLength)
	case !namePattern.MatchString(name):
		return Errorf(KindInvalid, "%s name %q: use lower-case letters, digits and dashes, begin with a letter and end with a letter or digit", what, clip(name))
	case strings.Contains(name, "--"):
		return Errorf(KindInvalid, "%s name %q: two dashes in a row are not allowed", what, name)
	}
	return nil
}

// CheckVolumeName says what is wrong with a volume's name: as CheckName, up to 40 characters so that `<workspace>-home` always fits.
func CheckVolumeName(name string) error {
	if len(name) > 40 {
		return Errorf(KindInvalid, "volume name %q has %d characters; at most 40 are allowed", clip(name), len(name))
	}
	if !namePattern.MatchString(name) || strings.Contains(name, "--") {
		return Errorf(KindInvalid, "volume name %q: use lower-case letters, digits and single dashes, begin with a letter and end with a letter or digit", clip(name))
	}
	return nil
}

// CheckLogin says what is wrong with a POSIX login.
func CheckLogin(login string) error {
	if login == "" || len(login) > MaxLoginLength || !loginPattern.MatchString(login) {
		return Errorf(KindInvalid, "login %q: use up to %d lower-case letters, digits, `_`, `-` and `.`, and begin with a letter or `_`", clip(login), MaxLoginLength)
	}
	if login == "root" {
		return Errorf(KindInvalid, "login root is not a person; choose another login")
	}
	return nil
}

// clip keeps an echoed input short.
func clip(s string) string {
	if len(s) > 40 {
		return s[:40] + "…"
	}
	return s
}

// CheckImageName says what is wrong with a catalogue name: `[a-z0-9]` with dots, dashes and underscores between, up to 64 characters.
func CheckImageName(name string) error {
	if len(name) == 0 || len(name) > 64 || !imageNamePattern.MatchString(name) {
		return Errorf(KindInvalid, "image name %q: use up to 64 lower-case letters, digits, `.`, `_` and `-`, and begin and end with a letter or digit", clip(name))
	}
	return nil
}
