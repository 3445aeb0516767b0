package fleet_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/carrel-dev/carrel/services/fleet"
)

func TestTransitions(t *testing.T) {
	states := fleet.States()
	for _, s := range states {
		if !s.CanBecome(s) {
			t.Errorf("%s may not stay", s)
		}
		if s.Placed() && !s.Live() {
			t.Errorf("%s is placed and not live", s)
		}
		if s != fleet.StateDeleted && s.CanBecome("unreachable") || fleet.State("unreachable").CanBecome(s) {
			t.Errorf("unreachable is no state, but %s knows it", s)
		}
		if s.Live() && !s.CanBecome(fleet.StateStopped) {
			t.Errorf("%s cannot be stopped", s)
		}
		if s.Placed() && s != fleet.StateStopping && s.CanBecome(fleet.StateDeleted) {
			t.Errorf("%s becomes deleted while its host may hold something of it", s)
		}
		if !s.Live() && s != fleet.StateDeleted && !s.CanBecome(fleet.StateQueued) {
			t.Errorf("%s cannot be started", s)
		}
		for _, next := range states {
			if !s.Live() && next.Placed() && s.CanBecome(next) {
				t.Errorf("%s becomes %s without having been queued", s, next)
			}
		}
		if s != fleet.StateDeleted && !reaches(s, fleet.StateDeleted) {
			t.Errorf("%s can never be deleted", s)
		}
	}
	for _, next := range states {
		if next != fleet.StateDeleted && fleet.StateDeleted.CanBecome(next) {
			t.Errorf("deleted becomes %s", next)
		}
		if next != fleet.StateQueued && !reaches(fleet.StateQueued, next) {
			t.Errorf("nothing leads to %s", next)
		}
	}
	if fleet.State("").Live() || fleet.State("x").Placed() {
		t.Error("an unknown state is live")
	}
}

func reaches(from, to fleet.State) bool {
	seen := []fleet.State{from}
	for i := 0; i < len(seen); i++ {
		for _, next := range fleet.States() {
			if seen[i].CanBecome(next) && !slices.Contains(seen, next) {
				seen = append(seen, next)
			}
		}
	}
	return slices.Contains(seen, to)
}

func drawSpec(t *rapid.T) fleet.Spec {
	text := rapid.SampledFrom([]string{"", "a", "b"})
	size := rapid.Int64Range(0, 2)
	return fleet.Spec{
		Pool: text.Draw(t, "pool"), Image: text.Draw(t, "image"), ImageDigest: text.Draw(t, "digest"),
		GPU:       fleet.GPURequest{Count: rapid.IntRange(0, 2).Draw(t, "gpus"), Models: rapid.SliceOfN(text, 0, 2).Draw(t, "models")},
		CPUMillis: size.Draw(t, "cpu"), MemoryMiB: size.Draw(t, "memory"), ShmMiB: size.Draw(t, "shm"), PidsLimit: size.Draw(t, "pids"),
		Env: rapid.MapOfN(text, text, 0, 2).Draw(t, "env"),
		Volumes: rapid.SliceOfN(rapid.Custom(func(t *rapid.T) fleet.VolumeUse {
			return fleet.VolumeUse{Volume: text.Draw(t, "volume"), Target: text.Draw(t, "target"), ReadOnly: rapid.Bool().Draw(t, "ro")}
		}), 0, 2).Draw(t, "volumes"),
	}
}

func TestSpecDifferenceIsReflexiveSymmetricAndComplete(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawSpec(t), drawSpec(t)
		if d := fleet.SpecDifference(a, a); len(d) != 0 {
			t.Fatalf("differs from itself in %v", d)
		}
		ab, ba := fleet.SpecDifference(a, b), fleet.SpecDifference(b, a)
		if !slices.Equal(ab, ba) {
			t.Fatalf("%v one way, %v the other", ab, ba)
		}
		same := equalButForEmpties(a, b)
		if same != (len(ab) == 0) {
			t.Fatalf("same: %t, difference %v\n%+v\n%+v", same, ab, a, b)
		}
	})
}

// equalButForEmpties takes nil and empty for the same.
func equalButForEmpties(a, b fleet.Spec) bool {
	for _, s := range []*fleet.Spec{&a, &b} {
		if len(s.Env) == 0 {
			s.Env = nil
		}
		if len(s.Volumes) == 0 {
			s.Volumes = nil
		}
		if len(s.GPU.Models) == 0 {
			s.GPU.Models = nil
		}
	}
	return reflect.DeepEqual(a, b)
}

// Each field that an owner can ask for is named by the difference; what the gateway finds out by itself is not.
func TestSpecDifferenceNamesEachField(t *testing.T) {
	derived := []string{"ImageHost", "RequireCUDA"}
	names := map[string]bool{}
	typ := reflect.TypeFor[fleet.Spec]()
	for i := range typ.NumField() {
		var changed fleet.Spec
		field := reflect.ValueOf(&changed).Elem().Field(i)
		switch field.Kind() {
		case reflect.String:
			field.SetString("x")
		case reflect.Int64:
			field.SetInt(1)
		case reflect.Map:
			changed.Env = map[string]string{"A": ""}
		case reflect.Slice:
			changed.Volumes = []fleet.VolumeUse{{}}
		case reflect.Struct:
			changed.GPU.Count = 1
		default:
			t.Fatalf("field %s: this test does not know how to change it", typ.Field(i).Name)
		}
		got := fleet.SpecDifference(fleet.Spec{}, changed)
		want := 1
		if slices.Contains(derived, typ.Field(i).Name) {
			want = 0
		}
		if len(got) != want {
			t.Errorf("%s changed: %v", typ.Field(i).Name, got)
		}
		for _, name := range got {
			names[name] = true
			if strings.ToLower(name) != name {
				t.Errorf("%s is no name of the wire", name)
			}
		}
	}
	if len(names) != 9 {
		t.Errorf("names %v", names)
	}
}

func TestNamesThatOthersRelyOn(t *testing.T) {
	w := fleet.Workspace{ID: "w1", Name: "demo"}
	if w.SSHPrincipal() != "demo.carrel.w1" || w.SSHHost() != "demo.carrel" {
		t.Errorf("%s %s", w.SSHPrincipal(), w.SSHHost())
	}
	if got := (fleet.RunKey{Workspace: "w1", Epoch: 3}).ContainerName(); got != "carrel-w1-3" {
		t.Errorf("container %s", got)
	}
}

func TestLeasable(t *testing.T) {
	good := fleet.Device{Present: true, Kind: fleet.KindGPU, Health: fleet.HealthOK}
	if ok, why := good.Leasable(); !ok || why != "" {
		t.Errorf("a good one: %t %q", ok, why)
	}
	for name, change := range map[string]func(*fleet.Device){
		"excluded": func(d *fleet.Device) { d.Excluded, d.ExcludedReason = true, "fan" },
		"lost":     func(d *fleet.Device) { d.Present = false },
		"MIG":      func(d *fleet.Device) { d.Kind = fleet.KindMIGParent },
		"xid":      func(d *fleet.Device) { d.Health, d.HealthReason = "xid", "79" },
		"":         func(d *fleet.Device) { d.Health = "" },
	} {
		d := good
		change(&d)
		if ok, why := d.Leasable(); ok || !strings.Contains(why, name) || why == "" {
			t.Errorf("%s: %t %q", name, ok, why)
		}
	}
}
