// A chart of ECharts that reports when it comes into view ("seen"), which stretch of its horizontal axis was dragged over
// ("stretch"), and a double-click ("whole"). It may be removed at any moment, also before it was drawn.
import { echarts } from "nicegui-echart";
import { convertDynamicProperties } from "../../static/utils/dynamic_properties.js";

const AROUND = "300px"; // around the window: charts within it are drawn before they are seen
const SHORTEST = 4; // pixels: a shorter drag is a click

// Turn texts under keys such as ":formatter" into functions. Data have none, and are too long to be searched.
function withFunctions(value) {
  if (Array.isArray(value)) return value.map(withFunctions);
  if (typeof value !== "object" || value === null) return value;
  const copy = {};
  for (const [name, part] of Object.entries(value)) copy[name] = name === "data" ? part : withFunctions(part);
  convertDynamicProperties(copy, false);
  return copy;
}

export default {
  template: "<div></div>",
  props: { options: Object, chooses: Boolean },
  mounted() {
    this.sight = new IntersectionObserver((entries) => this.see(entries.at(-1).isIntersecting), { rootMargin: AROUND });
    this.sight.observe(this.$el);
    this.size = new ResizeObserver(() => this.chart?.resize());
    this.size.observe(this.$el);
    if (this.chooses) this.listen();
    this.draw();
  },
  beforeUnmount() {
    this.sight.disconnect();
    this.size.disconnect();
    this.chart?.dispose();
  },
  watch: {
    options() {
      this.draw();
    },
  },
  methods: {
    see(isSeen) {
      if (isSeen !== this.isSeen) {
        this.isSeen = isSeen;
        this.$emit("seen", isSeen);
      }
    },
    draw() {
      if (!this.options?.series) return;
      this.chart ??= echarts.init(this.$el);
      this.chart.setOption(withFunctions(this.options), { notMerge: true });
    },
    listen() {
      this.$el.addEventListener("dblclick", () => this.$emit("whole"));
      this.$el.addEventListener("pointerdown", (event) => this.begin(event));
      this.$el.addEventListener("pointermove", (event) => this.move(event));
      this.$el.addEventListener("pointerup", (event) => this.end(event));
      this.$el.addEventListener("pointercancel", () => this.letGo());
    },
    begin(event) {
      const at = this.place(event);
      if (event.button !== 0 || !this.chart?.containPixel({ gridIndex: 0 }, at)) return;
      this.from = at[0];
      this.$el.setPointerCapture(event.pointerId);
    },
    move(event) {
      if (this.from === undefined) return;
      const to = this.place(event)[0];
      if (!this.band) {
        this.band = document.createElement("div");
        this.band.className = "tr-band";
        this.$el.append(this.band);
      }
      this.band.style.left = `${Math.min(this.from, to)}px`;
      this.band.style.width = `${Math.abs(to - this.from)}px`;
    },
    end(event) {
      if (this.from === undefined) return;
      const ends = [this.from, this.place(event)[0]].sort((a, b) => a - b);
      this.letGo();
      if (ends[1] - ends[0] < SHORTEST) return;
      const [begin, end] = ends.map((x) => this.chart.convertFromPixel({ xAxisIndex: 0 }, x));
      if (end > begin) this.$emit("stretch", [begin, end]);
    },
    letGo() {
      this.from = undefined;
      this.band?.remove();
      this.band = undefined;
    },
    place(event) {
      const box = this.$el.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    },
  },
};
